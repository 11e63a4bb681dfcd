"""Ranks that are killed at random: the run is started again, and ends as if nothing had happened.

`FEDDUA_TEST_KILLS=20 pytest tests/distributed/test_elastic.py` kills more often; `FEDDUA_TEST_TORCHRUN_KILLS` says
how often under a real torchrun.
"""

import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_feddua import FedDuAdam, FederatedCallback, Scaffold
from lightning_feddua.cli import main
from tests.forked_ranks import ForkedRanks, assert_same, fit, run
from tests.modules import DropoutCNN

KILLS = int(os.environ.get("FEDDUA_TEST_KILLS", 5))
TORCHRUN_KILLS = int(os.environ.get("FEDDUA_TEST_TORCHRUN_KILLS", 1))
ROUNDS = 4 + 3 * KILLS


def arguments():
    return {"server": FedDuAdam(), "client": Scaffold(), "local_steps": 2, "max_rounds": ROUNDS, "validate_every": 5}


class Slow(FederatedCallback):
    """Most of a round is local training, and a kill at any time shall hit that, too."""

    def on_client_start(self):
        time.sleep(0.005)


def table(run_dir):
    with (run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def rounds_done(out_dir):
    tables = sorted(out_dir.glob("version_*/metrics.csv"))
    return len(tables[-1].read_text().splitlines()) - 1 if tables else 0


@pytest.mark.slow
def test_ranks_killed_at_random(tmp_path):
    """As torchrun's agent goes on when a rank dies: the others get SIGTERM, and all are started again."""
    expected = run(1, tmp_path / "whole", DropoutCNN, arguments())
    out_dir = tmp_path / "killed"
    out_dir.mkdir()
    settings = {**arguments(), "checkpoint_every": 1, "callbacks": Slow()}

    def start():
        world_size = draw.randint(1, 4)
        return ForkedRanks(lambda: fit(out_dir, DropoutCNN, settings, ckpt_path="last"), world_size, tmp_path)

    draw = random.Random(0)
    for _ in range(KILLS):
        before, ranks = rounds_done(out_dir), start()
        # At least one round more, or the same round could be lost for ever; then at any moment of those that follow.
        while rounds_done(out_dir) <= before:
            assert ranks.running() == len(ranks.pids), [ranks.output(rank) for rank in range(len(ranks.pids))]
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.1))
        victim = draw.randrange(len(ranks.pids))
        os.kill(ranks.pids[victim], signal.SIGKILL)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGTERM)
        codes = ranks.wait(30)
        assert codes[victim] == -signal.SIGKILL
        assert 0 not in codes
    last = start()
    assert set(last.wait(120)) == {0}, last.output(0)
    assert_same(torch.load(out_dir / "result.pt", weights_only=True), expected)
    newest = max(out_dir.glob("version_*"))
    assert [row["round"] for row in table(newest)] == [str(round) for round in range(ROUNDS)]


@pytest.mark.slow
def test_torchrun_restarts_and_goes_on_with_fewer_processes(tmp_path):
    """The commands themselves."""
    recipe = [*("fit", "--config", "synthetic", "--loop.engine", "sequential", "--loop.accelerator", "cpu")]
    small = ["--data.dim", "20", "--model.dim", "20", "--loop.local_steps", "2", "--loop.checkpoint_every", "1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", str(TORCHRUN_KILLS)]
    torchrun += ["--monitor-interval", "0.1"]
    draw = random.Random(0)
    last = 40 * (TORCHRUN_KILLS + 1)

    errors = tmp_path / "errors.txt"

    def start(processes, rounds):
        command = [*torchrun, "--nproc-per-node", str(processes), "-m", "lightning_feddua", *recipe, *small]
        settings = ["--loop.out_dir", str(tmp_path), "--loop.max_rounds", str(rounds), "--ckpt_path", "last"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # Not a pipe, which the messages of many restarts would fill.
        with errors.open("w") as file:
            return subprocess.Popen([*command, *settings], env=environment, stderr=file)

    killed = start(2, last)
    for kill in range(1, TORCHRUN_KILLS + 1):
        moment = 40 * kill - draw.randrange(30)
        while rounds_done(tmp_path) < moment:
            assert killed.poll() is None, errors.read_text()
            time.sleep(0.01)
        workers = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
        os.kill(int(draw.choice(workers)), signal.SIGKILL)
    assert killed.wait(100 * (TORCHRUN_KILLS + 1)) == 0, errors.read_text()
    fewer = start(1, last + 10)
    assert fewer.wait(100 * (TORCHRUN_KILLS + 1)) == 0, errors.read_text()
    assert main([*recipe, *small, "--loop.out_dir", str(tmp_path / "whole"), "--loop.max_rounds", str(last + 10)]) == 0
    found, expected = (table(tmp_path / run_dir) for run_dir in ("version_0", "whole/version_0"))
    assert [row["round"] for row in found] == [str(round) for round in range(last + 10)]
    assert [row["val_loss"] for row in found] == [row["val_loss"] for row in expected]
