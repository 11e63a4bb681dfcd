"""SIGTERM to real processes, and a run that goes on afterwards."""

import csv
import os
import signal
import subprocess
import sys
import time

import pytest

from lightning_feddua.checkpoints.files import read
from lightning_feddua.cli import main

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FIT = [
    *("-m", "lightning_feddua", "fit", "--config", "synthetic", "--server", "FedAvg", "--loop.accelerator", "cpu"),
    *("--data.dim", "20", "--model.dim", "20", "--loop.checkpoint_every", "100000"),
]


def start(arguments, out_dir, rounds):
    command = [sys.executable, *arguments, "--loop.out_dir", str(out_dir), "--loop.max_rounds", str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses(run_dir):
    with (run_dir / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [int(row["round"]) for row in table] == list(range(len(table)))
    return [float(row["val_loss"]) for row in table]


def preempt(command, out_dir):
    """Start a run, and stop it by SIGTERM after a few rounds; return its exit code and what it had to say."""
    process = start(command, out_dir, 1_000_000)
    table = out_dir / "version_0/metrics.csv"
    deadline = time.monotonic() + 200
    while not (table.exists() and len(table.read_text().splitlines()) > 3):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    return process.returncode, errors


def check(out_dir, saved):
    """The run that was continued is one that never stopped."""
    assert sorted(path.name for path in out_dir.iterdir()) == ["version_0"]
    assert main([*FIT[2:], "--loop.out_dir", str(out_dir), "--loop.max_rounds", str(saved + 2)]) == 0
    assert losses(out_dir / "version_0") == pytest.approx(losses(out_dir / "version_1"), rel=1e-6)


@pytest.mark.slow
def test_torchrun(tmp_path, capsys):
    command = [*TORCHRUN, *FIT]
    code, errors = preempt(command, tmp_path)
    # torchrun has an exit code of its own.
    assert code != 0
    assert "SIGTERM: saved after" in errors
    saved = read(tmp_path / "version_0/last.ckpt")["epoch"]
    assert len(losses(tmp_path / "version_0")) == saved
    continued = start([*command, "--ckpt_path", "last"], tmp_path, saved + 2)
    output, errors = continued.communicate(timeout=200)
    assert continued.returncode == 0, errors
    assert output.count("results in") == 1
    check(tmp_path, saved)


@pytest.mark.slow
def test_ranks_started_by_rank_zero_and_one_rank_afterwards(tmp_path, capsys):
    code, errors = preempt([*FIT, "--loop.devices", "2"], tmp_path)
    assert code == 143
    assert "Traceback" not in errors
    checkpoint = read(tmp_path / "version_0/last.ckpt")
    saved = checkpoint["federated"]["parts"]["lightning_feddua.cli.fit.SaveRecipe 0"]
    assert "lightning_feddua.FedAvg" in saved["recipe"]
    rounds = ["--loop.max_rounds", str(checkpoint["epoch"] + 2)]
    assert main([*FIT[2:], "--loop.out_dir", str(tmp_path), *rounds, "--ckpt_path", "last"]) == 0
    check(tmp_path, checkpoint["epoch"])
