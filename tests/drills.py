"""Faults on purpose: ``python -m tests.drills --tries 200`` tries many kinds at random moments and prints a table.

No fault may lose a finished round, hang beyond its timeout, or end a process without a message.
"""

import argparse
import itertools
import os
import random
import resource
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import Dataset

from lightning_feddua import FedDuAdam, FederatedCallback, FederatedDataModule, Scaffold
from lightning_feddua.checkpoints.files import read
from tests.forked_ranks import ForkedRanks, assert_same, fit, run, unequal_clients
from tests.modules import DropoutCNN

ROUNDS = 5
SECONDS = 40


def arguments(**more):
    settings = {"server": FedDuAdam(), "client": Scaffold(), "local_steps": 2, "max_rounds": ROUNDS}
    return {**settings, "checkpoint_every": 1, **more}


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

    def start(self, *callbacks, world_size=None, ckpt_path="last", data=unequal_clients, before=None, **more):
        """Ranks that train, with something in their way."""
        world_size = self.draw.randint(1, 3) if world_size is None else world_size
        settings = arguments(callbacks=list(callbacks), timeout=20.0, **more)
        model = settings.pop("model", DropoutCNN)

        def rank():
            if before is not None:
                before()
            fit(self.out_dir, model, settings, ckpt_path, data)

        return ForkedRanks(rank, world_size, self.folder)

    def fail(self, *args, **more):
        """Ranks that shall not come to their end; who was not killed has something to say."""
        ranks = self.start(*args, **more)
        codes = ranks.wait(SECONDS)
        assert any(codes), "nothing has happened"
        for rank, code in enumerate(codes):
            assert code in (0, -signal.SIGKILL) or ranks.output(rank).strip(), f"rank {rank} ended without a message"
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
        assert_same(torch.load(self.out_dir / "result.pt", weights_only=True), self.expected)
        newest = max(self.out_dir.glob("version_*"))
        rows = (newest / "metrics.csv").read_text().splitlines()[1:]
        assert [row.split(",")[0] for row in rows] == [str(i) for i in range(ROUNDS)]
        return ranks

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


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_between_rounds(drill):
    hook = drill.draw.choice(["round start", "round end", "aggregate"])
    world_size = drill.draw.randint(1, 3)
    at = At(hook, drill.draw.randrange(ROUNDS), drill.draw.randrange(world_size), kill)
    drill.fail(at, world_size=world_size)
    return drill.recover()


def kill_inside_a_client(drill):
    world_size = drill.draw.randint(1, 3)
    at = At("client", drill.draw.randrange(ROUNDS), drill.draw.randrange(world_size), kill, drill.draw.randrange(2))
    drill.fail(at, world_size=world_size)
    return drill.recover()


def kill_during_a_save(drill):
    # Each file is replaced once and synchronised twice, and each round has two files.
    name, nth = drill.draw.choice([("fsync", drill.draw.randrange(2, 20)), ("replace", drill.draw.randrange(1, 10))])

    def before():
        calls, original = itertools.count(), getattr(os, name)
        setattr(os, name, lambda *args: kill() if next(calls) == nth else original(*args))

    drill.fail(before=before)
    return drill.recover()


def kill_in_the_all_reduce(drill):
    world_size = drill.draw.randint(2, 3)
    victim, nth = drill.draw.randrange(world_size), drill.draw.randrange(1, ROUNDS)

    def before():
        if int(os.environ["RANK"]) == victim:
            calls, original = itertools.count(), torch.distributed.all_reduce

            def all_reduce(*args, **kwargs):
                work = original(*args, **kwargs)
                return kill() if next(calls) == nth else work

            torch.distributed.all_reduce = all_reduce

    ranks = drill.fail(before=before, world_size=world_size)
    others = [ranks.output(rank) for rank in range(world_size) if rank != victim]
    assert all("RankError" in output or "Connection" in output for output in others), others
    return drill.recover()


def sigterm(drill):
    world_size = drill.draw.randint(1, 3)
    at = At("client", drill.draw.randrange(ROUNDS), drill.draw.randrange(world_size), lambda: signal.raise_signal(15))
    ranks = drill.fail(at, world_size=world_size)
    assert ranks.codes == [143] * world_size, ranks.codes
    return drill.recover()


def stopped_rank(drill):
    victim = drill.draw.randrange(3)
    at = At("client", drill.draw.randrange(ROUNDS), victim, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    settings = arguments(callbacks=[at], timeout=2.0)
    ranks = ForkedRanks(lambda: fit(drill.out_dir, DropoutCNN, settings, "last"), 3, drill.folder)
    others = [rank for rank in range(3) if rank != victim]
    ranks.wait(20, others)
    ranks.kill()
    assert any(f"RankError: Rank {victim}" in ranks.output(rank) for rank in others), [ranks.output(r) for r in others]
    assert drill.recover()
    return "named within the timeout; went on to the same bits"


def full_disk(drill):
    first = drill.draw.randrange(1, ROUNDS - 1)

    class Fill(FederatedCallback):
        def on_round_start(self, round):
            limit = 3000 if round in (first, first + 1) else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        def on_fit_end(self):
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    last = drill.draw.randint(first + 1, ROUNDS)
    ranks = drill.start(Fill(), max_rounds=last)
    assert not any(ranks.wait(SECONDS)), ranks.output(0)
    assert "could not be saved" in ranks.output(0)
    drill.recover()
    return "a warning; went on to the same bits"


def folder_that_cannot_be_written(drill):
    blocked = drill.folder / "file"
    blocked.write_text("")
    drill.out_dir = drill.draw.choice([blocked, blocked / "runs", Path("/proc/runs")])
    ranks = drill.start(ckpt_path=None)
    assert set(ranks.wait(SECONDS)) == {1}
    assert "cannot be written" in ranks.output(0)
    return "refused in a sentence"


def truncated_checkpoint(drill):
    last = drill.saved_run(drill.draw.randint(2, ROUNDS - 1)) / "last.ckpt"
    content = last.read_bytes()
    last.write_bytes(content[: drill.draw.randrange(len(content))])
    ranks = drill.finish()
    assert "Looking for an older one" in ranks.output(0)
    return "an older one is used; went on to the same bits"


def flipped_bit(drill):
    last = drill.saved_run(drill.draw.randint(2, ROUNDS - 1)) / "last.ckpt"
    content = bytearray(last.read_bytes())
    content[drill.draw.randrange(len(content))] ^= 1 << drill.draw.randrange(8)
    last.write_bytes(content)
    # A bit that means nothing, such as one of a date, may pass; the result is the same.
    noticed = "Looking for an older one" in drill.finish().output(0)
    return "an older one is used; went on to the same bits" if noticed else "harmless; went on to the same bits"


def damaged_everywhere(drill):
    run_dir = drill.saved_run(2)
    for path in run_dir.glob("*.ckpt"):
        path.write_bytes(path.read_bytes()[:100])
    ranks = drill.start()
    assert set(ranks.wait(SECONDS)) == {1}
    assert "Every checkpoint in" in ranks.output(0)
    return "refused in a sentence"


def two_runs_at_once(drill):
    slow = At("client", 2, 0, lambda: time.sleep(0.2))
    first = drill.start(slow, world_size=1, ckpt_path=None)
    (drill.folder / "second").mkdir()
    settings = arguments(timeout=20.0)
    later = drill.draw.choice([None, "last"])
    while later == "last" and first.running() and drill.finished_rounds() < 2:
        time.sleep(0.01)
    second = ForkedRanks(lambda: fit(drill.out_dir, DropoutCNN, settings, later), 1, drill.folder / "second")
    codes = [*first.wait(SECONDS), *second.wait(SECONDS)]
    assert codes[0] == 0, first.output(0)
    refused = codes[1] == 1 and "is still being continued by another process" in second.output(0)
    assert codes[1] == 0 or refused, second.output(0)
    assert_same(torch.load(drill.out_dir / "result.pt", weights_only=True), drill.expected)
    return "the second is refused" if refused else "each in a folder of its own, the same bits"


def clock_jumps(drill):
    jumps = random.Random(drill.draw.random())

    def before():
        original = time.time
        time.time = lambda: original() + jumps.uniform(-1e7, 1e7)

    drill.start(before=before, max_rounds=2).wait(SECONDS)
    ranks = drill.start(before=before)
    assert not any(ranks.wait(SECONDS)), ranks.output(0)
    result = torch.load(drill.out_dir / "result.pt", weights_only=True)
    assert_same(result, drill.expected)
    return "the same bits"


def changed_data(drill):
    drill.saved_run(2)
    client, shift = drill.draw.randrange(11), drill.draw.choice([0.01, -3.0])

    def changed():
        data = unequal_clients()
        data.clients[str(client)].tensors[0].add_(shift)
        return data

    ranks = drill.start(data=changed)
    assert set(ranks.wait(SECONDS)) == {1}
    assert "the clients' samples are not what they were" in ranks.output(0)
    return "refused in a sentence"


class Unreadable(Dataset):
    """Samples of which some cannot be read, always or now and then."""

    def __init__(self, dataset, probability):
        self._dataset, self._probability = dataset, probability

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        if torch.rand(()) < self._probability:
            raise OSError("unreadable")
        return self._dataset[index]


def bad_clients(kind, names):
    def data():
        good = unequal_clients()
        clients = dict(good.clients)
        for name in names:
            if kind in ("nan", "inf"):
                clients[name].tensors[0][0, 0, 0, 0] = float(kind)
                clients[name].tensors[0][1:] = clients[name].tensors[0][0]
            else:
                clients[name] = Unreadable(clients[name], 1.0 if kind == "exception" else 0.05)
        return FederatedDataModule(clients, good.val_dataset, batch_size=10, eval_batch_size=16)

    return data


def skipped_clients(drill, kind):
    names = [str(i) for i in drill.draw.sample(range(11), 3 if kind != "random" else 11)]
    data = bad_clients(kind, names)
    ranks = drill.start(data=data, world_size=drill.draw.randint(2, 3), ckpt_path=None, on_client_error="skip")
    assert not any(ranks.wait(SECONDS)), ranks.output(0)
    found = torch.load(drill.out_dir / "result.pt", weights_only=True)
    assert all(value.isfinite().all() for value in found["state"].values())
    assert sum(row["skipped_clients"] for row in found["history"]) == sum(
        ranks.output(rank).count("is left out of round") for rank in range(len(ranks.pids))
    )
    alone = drill.start(data=data, world_size=1, ckpt_path=None, on_client_error="skip")
    assert not any(alone.wait(SECONDS)), alone.output(0)
    assert_same(torch.load(drill.out_dir / "result.pt", weights_only=True), found)
    return "left out, the same on all ranks"


def raised_clients(drill, kind):
    names = [str(i) for i in drill.draw.sample(range(11), 8)]
    ranks = drill.start(data=bad_clients(kind, names), world_size=drill.draw.randint(1, 3), ckpt_path=None)
    assert set(ranks.wait(SECONDS)) == {1}
    assert all("failed in round" in ranks.output(rank) for rank in range(len(ranks.pids)))
    return "named, on all ranks"


def nan_update(drill):
    return drill.draw.choice([skipped_clients, raised_clients])(drill, "nan")


def inf_update(drill):
    return drill.draw.choice([skipped_clients, raised_clients])(drill, "inf")


def exception_in_a_dataset(drill):
    return drill.draw.choice([skipped_clients, raised_clients])(drill, "exception")


def failures_at_random(drill):
    return skipped_clients(drill, "random")


KINDS = [
    *(kill_between_rounds, kill_inside_a_client, kill_during_a_save, kill_in_the_all_reduce, sigterm, stopped_rank),
    *(full_disk, folder_that_cannot_be_written, truncated_checkpoint, flipped_bit, damaged_everywhere),
    *(two_runs_at_once, clock_jumps, changed_data),
    *(nan_update, inf_update, exception_in_a_dataset, failures_at_random),
]


def undisturbed(folder):
    return run(1, folder / "undisturbed", DropoutCNN, arguments())


def attempt(kind, seed, folder, expected):
    """Try one fault, and say what came of it."""
    folder.mkdir(parents=True)
    return kind(Drill(folder, random.Random(f"{kind.__name__} {seed}"), expected))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--only", choices=[kind.__name__ for kind in KINDS])
    options = parser.parse_args()
    outcomes = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = undisturbed(folder)
        kinds = [kind for kind in KINDS if options.only in (None, kind.__name__)]
        for i in range(options.tries):
            kind = kinds[i % len(kinds)]
            try:
                outcome = attempt(kind, i, folder / str(i), expected)
            except Exception as error:
                outcome = f"FAILED (seed {i}): {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            outcomes[kind.__name__.replace("_", " "), outcome] += 1
    width = max(len(fault) for fault, _ in outcomes)
    print(f"{'fault':{width}}  tries  outcome")
    for (fault, outcome), count in sorted(outcomes.items()):
        print(f"{fault:{width}}  {count:5}  {outcome}")
    failed = sum(count for (_, outcome), count in outcomes.items() if outcome.startswith("FAILED"))
    print(f"{options.tries} tries, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
