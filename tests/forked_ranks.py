"""Ranks as torchrun starts them, but forked: they start at once, and each can be killed or stopped."""

import logging
import os
import signal
import socket
import sys
import time
import traceback
import warnings

import torch

from lightning_feddua import FederatedDataModule, FederatedLoop
from tests.modules import images


class ForkedRanks:
    """Processes that call a function with the environment of a rank, each with a file for what it prints.

    Args:
        function: what each rank does.
        world_size: the number of ranks.
        folder: where the files go.
    """

    def __init__(self, function, world_size, folder):
        self._files = [folder / f"rank{rank}.txt" for rank in range(world_size)]
        self.codes = [None] * world_size
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pids = [self._fork(function, rank, world_size, port) for rank in range(world_size)]

    def _fork(self, function, rank, world_size, port):
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            output = os.open(self._files[rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            _write_to_the_own_output()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            environment |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in environment.items()}, TORCHELASTIC_RUN_ID="test")
            function()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            # Whatever happens, such as a full disk, no second copy of the parent may go on.
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def output(self, rank):
        """What a rank has printed so far."""
        return self._files[rank].read_text()

    def running(self):
        """How many are still there."""
        return sum(not self._ended(rank) for rank in range(len(self.pids)))

    def wait(self, seconds=60, ranks=None):
        """Exit codes, minus the signal for those ended by one; who is still there after the time is killed."""
        waiting = set(range(len(self.pids)) if ranks is None else ranks)
        deadline = time.monotonic() + seconds
        while (left := [rank for rank in waiting if not self._ended(rank)]) and time.monotonic() < deadline:
            time.sleep(0.01)
        hanging = list(left)
        if ranks is None or hanging:
            self.kill()
        assert not hanging, f"ranks {hanging} hang: {[self.output(rank) for rank in hanging]}"
        return self.codes

    def kill(self):
        """End what is left."""
        for rank, pid in enumerate(self.pids):
            if not self._ended(rank):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.codes[rank] = -signal.SIGKILL

    def _ended(self, rank):
        if self.codes[rank] is None:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
        return self.codes[rank] is not None


def _write_to_the_own_output():
    """Prints, warnings and logs go to file descriptors 1 and 2, past pytest, which would keep them."""
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    warnings.resetwarnings()
    warnings.showwarning = lambda *args, **_: print(warnings.formatwarning(*args[:4]), file=sys.stderr)
    # Of loggers without a handler: Lightning's get none where they are first imported in a test, as pytest's are there.
    logging.basicConfig(stream=sys.stderr, format="%(message)s", force=True)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", []):
            if type(handler) is logging.StreamHandler:
                # Not `setStream`, which flushes the old one, and that may be closed.
                handler.stream = sys.stderr


def unequal_clients():
    clients = {str(i): images(5 + 5 * i, seed=i) for i in range(11)}
    return FederatedDataModule(clients, images(50, seed=99), batch_size=10, eval_batch_size=16)


def make_loop(out_dir, arguments):
    defaults = {"max_rounds": 20, "clients_per_round": 6, "engine": "sequential", "timeout": 60.0}
    fixed = {"out_dir": out_dir, "enable_progress_bar": False, "accelerator": "cpu"}
    return FederatedLoop(**{**defaults, **fixed, **arguments})


def fit(out_dir, model, arguments, ckpt_path=None, data=unequal_clients):
    """Run one rank; the first leaves weights, buffers and history in a file."""
    torch.manual_seed(0)
    model = model()
    loop = make_loop(out_dir, arguments)
    loop.fit(model, data(), ckpt_path)
    if loop.fabric.is_global_zero:
        history = [{k: v for k, v in row.items() if k != "seconds"} for row in loop.history]
        torch.save({"state": model.state_dict(), "history": history}, out_dir / "result.pt")


def run(world_size, out_dir, *arguments, **more):
    out_dir.mkdir(exist_ok=True)
    ranks = ForkedRanks(lambda: fit(out_dir, *arguments, **more), world_size, out_dir)
    assert ranks.wait(120) == [0] * world_size, [ranks.output(rank) for rank in range(world_size)]
    return torch.load(out_dir / "result.pt", weights_only=True)


def assert_same(first, second):
    assert first["state"].keys() == second["state"].keys()
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
    # As text, in which every bit of a number shows, and NaN is the same as NaN.
    assert repr(first["history"]) == repr(second["history"])
