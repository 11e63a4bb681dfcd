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


@pytest.mark.parametrize(
    ("command", "code"),
    [([*TORCHRUN, *FIT], None), ([*FIT, "--loop.devices", "2"], 143)],
    ids=["torchrun", "script"],
)
def test_preempted_run_goes_on(tmp_path, capsys, command, code):
    process = start(command, tmp_path, 1_000_000)
    table = tmp_path / "version_0/metrics.csv"
    deadline = time.monotonic() + 100
    while not (table.exists() and len(table.read_text().splitlines()) > 3):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=100)
    # torchrun has a code of its own, and says what became of its workers.
    assert process.returncode == code if code is not None else process.returncode != 0, errors
    assert "Traceback" not in errors.split("torch/distributed/")[0], errors
    saved = read(tmp_path / "version_0/last.ckpt")["epoch"]
    assert len(losses(tmp_path / "version_0")) == saved
    assert "presets" not in read(tmp_path / "version_0/last.ckpt")

    process = start([*command, "--ckpt_path", "last"], tmp_path, saved + 2)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert output.count("results in") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version_0"]

    assert main([*FIT[2:], "--loop.out_dir", str(tmp_path), "--loop.max_rounds", str(saved + 2)]) == 0
    assert losses(tmp_path / "version_0") == pytest.approx(losses(tmp_path / "version_1"), rel=1e-6)
