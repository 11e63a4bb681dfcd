"""One try of a fault: ranks that train with something in their way, and the same command again afterwards."""

import os
import signal

import torch

from lightning_feddua import FedDuAdam, FederatedCallback, Scaffold
from lightning_feddua.callbacks import Checkpoint
from lightning_feddua.checkpoints.files import read
from tests.forked_ranks import ForkedRanks, assert_same, fit, unequal_clients
from tests.modules import BatchNormCNN

ROUNDS = 5
SECONDS = 40
# What torch takes by default in one process; torchrun gives each of several a single thread.
CORES = len(os.sched_getaffinity(0))


def arguments(**more):
    settings = {"server": FedDuAdam(), "client": Scaffold(), "local_steps": 2, "max_rounds": ROUNDS}
    settings |= {"reproducible": True, "timeout": 20.0, **more}
    # All rounds are kept, so that there is an older one where the newest is damaged.
    return {**settings, "callbacks": [*more.get("callbacks", []), Checkpoint(save_top_k=-1)]}


class Drill:
    """A try of one fault.

    Args:
        folder: of its own.
        draw: a source of random moments.
        expected: the result of the run without a fault.
    """

    def __init__(self, folder, draw, expected):
        self.folder, self.draw, self.expected = folder, draw, expected
        self.out_dir = folder / "runs"
        self.out_dir.mkdir()

    def ranks(self, function, world_size=None, folder=None):
        """Processes that call a function, with one thread each or with as many as there are cores."""
        world_size = self.draw.randint(1, 3) if world_size is None else world_size
        threads = self.draw.choice([1, CORES])

        def rank():
            torch.set_num_threads(threads)
            function()

        return ForkedRanks(rank, world_size, folder or self.folder)

    def start(self, *callbacks, world_size=None, ckpt_path="last", before=None, odd=None, folder=None, **more):
        """Ranks that train, with something in their way.

        Args:
            *callbacks: of all ranks.
            world_size: how many; drawn at random if None.
            ckpt_path: what is resumed.
            before: called on each rank at first.
            odd: a rank, and what is different there.
            folder: where their output goes.
            **more: what is different on all: the loop's arguments, ``model`` and ``data``.
        """

        def run():
            if before is not None:
                before()
            own = {} if odd is None or odd[0] != int(os.environ["RANK"]) else odd[1]
            settings = arguments(callbacks=list(callbacks), **{**more, **own})
            model, data = settings.pop("model", BatchNormCNN), settings.pop("data", unequal_clients)
            fit(self.out_dir, model, settings, ckpt_path, data)

        return self.ranks(run, world_size, folder)

    def fail(self, *args, **more):
        """Ranks that shall not come to their end; who was not killed has something to say."""
        ranks = self.start(*args, **more)
        codes = ranks.wait(SECONDS)
        assert any(codes), "nothing has happened"
        for rank, code in enumerate(codes):
            # Of a signal, the first rank tells for all.
            silent = code in (0, -signal.SIGKILL) or (rank and code == 143)
            assert silent or ranks.output(rank).strip(), f"rank {rank} ended without a message"
        return ranks

    def finished_rounds(self):
        """Rounds whose row is in the table."""
        tables = sorted(self.out_dir.glob("version_*/metrics.csv"))
        return len(tables[-1].read_text().splitlines()) - 1 if tables else 0

    def recover(self):
        """The same command again: nothing that was finished is lost, and the end is that of the undisturbed run."""
        done = self.finished_rounds()
        if done > 1:
            saved = [read(path)["epoch"] for path in self.out_dir.glob("version_*/last.ckpt")]
            # The last row may be that of a round whose checkpoint was being written.
            assert max(saved, default=0) >= done - 1, f"{done} rounds in the table, {saved} saved"
        self.finish()
        return "went on to the same bits"

    def finish(self):
        ranks = self.start()
        codes = ranks.wait(SECONDS)
        assert not any(codes), ranks.output(0)
        assert_same(self.result(), self.expected)
        newest = max(self.out_dir.glob("version_*"))
        rows = (newest / "metrics.csv").read_text().splitlines()[1:]
        assert [row.split(",")[0] for row in rows] == [str(i) for i in range(ROUNDS)]
        return ranks

    def result(self):
        return torch.load(self.out_dir / "result.pt", weights_only=True)

    def saved_run(self, rounds):
        ranks = self.start(max_rounds=rounds)
        assert not any(ranks.wait(SECONDS)), ranks.output(0)
        return self.out_dir / "version_0"


class At(FederatedCallback):
    """Does something to a rank at a moment of a round."""

    def __init__(self, hook, round, rank, action, nth=0):
        self.hook, self.round, self.rank, self.action, self.countdown = hook, round, rank, action, nth

    def _act(self, loop, hook, round):
        if (hook, round, loop.fabric.global_rank % max(loop.fabric.world_size, 1)) == (
            self.hook,
            self.round,
            self.rank,
        ):
            self.countdown -= 1
            if self.countdown < 0:
                self.action()

    def on_round_start(self, loop, round):
        self._act(loop, "round start", round)

    def on_round_end(self, loop, round):
        self._act(loop, "round end", round)

    def on_client_start(self, loop, round):
        self._act(loop, "client", round)

    def on_aggregate_end(self, loop):
        self._act(loop, "aggregate", loop.current_round)
