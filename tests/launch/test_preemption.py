"""SIGTERM ends a round, saves, and leaves."""

import os
import signal
import time
from functools import partial

import pytest

from lightning_feddua import FederatedCallback
from lightning_feddua.checkpoints.files import read
from tests.checkpoints.checkpointed_runs import assert_same, fit, in_child, make


@pytest.fixture
def make_loop(tmp_path):
    return partial(make, out_dir=tmp_path)


class Terminate(FederatedCallback):
    """Sends SIGTERM, once and again, to the process of a rank or to the one that has forked all, in a round."""

    def __init__(self, round, rank=0, parent=False):
        self.round, self.rank, self.parent = round, rank, parent

    def on_round_start(self, loop, round):
        if (round, loop.fabric.global_rank) == (self.round, self.rank):
            for _ in range(2):
                os.kill(os.getppid() if self.parent else os.getpid(), signal.SIGTERM)
            while not loop._preemption.requested:
                time.sleep(0.01)


@pytest.mark.parametrize(
    ("devices", "terminate"),
    [(1, Terminate(1)), (1, Terminate(3)), (2, Terminate(1, rank=1)), (2, Terminate(1, parent=True))],
    ids=["one rank", "last round", "another rank", "parent"],
)
def test_sigterm_saves_and_leaves(make_loop, tmp_path, devices, terminate):
    arguments = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    expected = fit(make_loop(out_dir=tmp_path / "whole", **arguments))
    assert in_child(lambda: fit(make_loop(checkpoint_every=100, callbacks=terminate, **arguments))) == 143
    assert read(tmp_path / "version_0/last.ckpt")["epoch"] == terminate.round + 1
    assert_same(fit(make_loop(**arguments), ckpt_path="last"), expected)


def test_sigterm_keeps_its_meaning_without_checkpoints(make_loop):
    assert in_child(lambda: fit(make_loop(callbacks=Terminate(1), enable_checkpointing=False))) == -signal.SIGTERM
    loop = make_loop(max_rounds=1, checkpoint_every=1)
    fit(loop)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
