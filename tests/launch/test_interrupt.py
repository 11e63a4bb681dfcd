"""Ctrl-C ends a round, saves, says how to resume, and raises KeyboardInterrupt; a second one ends at once."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from lightning_feddua import FederatedCallback
from lightning_feddua.checkpoints.files import read
from lightning_feddua.launch.preemption import Preemption
from tests.checkpoints.checkpointed_runs import assert_same, fit, in_child, make


@pytest.fixture
def make_loop(tmp_path):
    return partial(make, out_dir=tmp_path, engine="sequential")


@pytest.fixture(autouse=True)
def _interruptible():
    """Shells start what is to run in the background with SIGINT ignored, pytest included."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupt(FederatedCallback):
    """Sends SIGINT in a round: to all processes of the group, as a terminal does, to a rank or to the parent."""

    def __init__(self, round, to, rank=0, times=1):
        self.round, self.to, self.rank, self.times = round, to, rank, times

    def on_round_start(self, loop, round):
        if (round, loop.fabric.global_rank) == (self.round, self.rank):
            for time_ in range(self.times):
                time.sleep(1.2 if time_ else 0)
                if self.to == "group":
                    os.killpg(os.getpgid(0), signal.SIGINT)
                else:
                    os.kill(os.getpid() if self.to == "rank" else os.getppid(), signal.SIGINT)
            while not loop._preemption.interrupted:
                time.sleep(0.01)


def interrupted(function):
    """The exit code of a process in which a function is called, 130 for KeyboardInterrupt."""

    def call():
        try:
            function()
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    return in_child(call)


@pytest.mark.parametrize(
    ("devices", "interrupt"),
    [
        (1, Interrupt(1, "rank")),
        (1, Interrupt(3, "rank")),
        (2, Interrupt(1, "group")),
        (2, Interrupt(1, "rank", rank=1)),
        (2, Interrupt(1, "parent")),
    ],
    ids=["one rank", "last round", "terminal", "another rank", "parent"],
)
def test_ctrl_c_saves_and_leaves(make_loop, tmp_path, devices, interrupt, capfd):
    ranks = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    expected = fit(make_loop(out_dir=tmp_path / "whole", **ranks))
    assert interrupted(lambda: fit(make_loop(callbacks=interrupt, **ranks))) == 130
    output = capfd.readouterr().err
    assert ("press again to end at once" in output) == (interrupt.rank == 0)
    assert read(tmp_path / "version_0/last.ckpt")["epoch"] == interrupt.round + 1
    assert_same(fit(make_loop(**ranks), ckpt_path="last"), expected)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_second_one_ends_the_run_at_once(make_loop, tmp_path, devices):
    ranks = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    assert interrupted(lambda: fit(make_loop(callbacks=Interrupt(1, "group", times=2), **ranks))) == 130
    assert not list(tmp_path.glob("**/*.ckpt"))


def test_without_checkpoints_it_keeps_its_meaning(make_loop):
    class Press(FederatedCallback):
        def on_round_start(self, round):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    loop = make_loop(callbacks=Press(), enable_checkpointing=False)
    with pytest.raises(KeyboardInterrupt):
        fit(loop)
    assert loop.history == []


def test_handlers_are_put_back(make_loop):
    before = signal.getsignal(signal.SIGINT)
    fit(make_loop(max_rounds=1))
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Preemption(enabled=True):
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_another_thread_nothing_is_installed(make_loop):
    before = signal.getsignal(signal.SIGINT)
    loop = make_loop(max_rounds=1)
    thread = threading.Thread(target=lambda: fit(loop))
    thread.start()
    thread.join()
    assert len(loop.history) == 1
    assert signal.getsignal(signal.SIGINT) is before


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FIT = [
    *("-m", "lightning_feddua", "fit", "--config", "synthetic", "--server", "FedAvg", "--loop.accelerator", "cpu"),
    *("--data.dim", "20", "--model.dim", "20", "--loop.max_rounds", "1000000"),
]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(FIT, marks=pytest.mark.slow),
        pytest.param([*FIT, "--loop.devices", "2"], marks=pytest.mark.slow),
        pytest.param([*TORCHRUN, *FIT], marks=pytest.mark.slow),
    ],
    ids=["one rank", "ranks started by rank zero", "torchrun"],
)
def test_from_a_terminal(tmp_path, command):
    """SIGINT to the whole process group; the printed command goes on."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, *command, "--loop.out_dir", str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    table = tmp_path / "version_0/metrics.csv"
    deadline = time.monotonic() + 200
    while not (table.exists() and len(table.read_text().splitlines()) > 3):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == (1 if "torch.distributed.run" in command else 130), errors
    saved = read(tmp_path / "version_0/last.ckpt")["epoch"]
    resume = f"feddua fit --config {tmp_path}/version_0/recipe.yaml --ckpt_path {tmp_path}/version_0/last.ckpt"
    assert f"Ctrl-C: saved after {saved} rounds. Resume with `{resume}`." in errors
