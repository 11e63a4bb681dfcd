"""Fabric's own launchers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_feddua import ConfigurationError, FederatedDataModule, FederatedLoop
from lightning_feddua.launch.fabric import _match_torchrun
from tests.modules import Classifier, classification


def test_forked_ranks_bring_results_home(tmp_path):
    data = FederatedDataModule(
        {str(i): classification(20 + i, seed=i) for i in range(5)}, classification(33, seed=9), eval_batch_size=8
    )
    models, histories = [], []
    for arguments in ({"devices": 1}, {"devices": 2, "strategy": "ddp_fork"}):
        torch.manual_seed(0)
        model = Classifier()
        loop = FederatedLoop(
            max_rounds=3, local_steps=3, out_dir=tmp_path, accelerator="cpu", enable_progress_bar=False, **arguments
        )
        for _ in range(2):
            torch.manual_seed(0)
            model = Classifier()
            loop.fit(model, data)
        assert loop.validate(model, data)["val_loss"] == pytest.approx(
            loop.history[-1]["last_iterate/val_loss"], rel=1e-5
        )
        assert (loop.run_dir / "metrics.csv").exists()
        models.append(model)
        histories.append(loop.history)
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert [row["round"] for row in histories[1]] == [0, 1, 2]


@pytest.mark.slow
def test_script_launcher_starts_the_other_ranks(tmp_path):
    command = [sys.executable, "-m", "lightning_feddua", "fit", "--config", "synthetic", "--loop.devices", "2"]
    settings = ["--loop.max_rounds", "2", "--loop.accelerator", "cpu", "--loop.out_dir", str(tmp_path)]
    finished = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert "2 ranks: 2 x cpu" in finished.stdout
    assert [p.name for p in Path(tmp_path).iterdir()] == ["version_0"]


def test_several_nodes_under_torchrun(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert _match_torchrun("auto", 1) == (4, 2)
    assert _match_torchrun([0, 1, 2, 3], 2) == ([0, 1, 2, 3], 2)
    with pytest.raises(ConfigurationError, match=r"`num_nodes=3` does not match torchrun, which started 2 nodes\."):
        _match_torchrun(4, 3)


@pytest.mark.parametrize("devices", [99_999_999, "99999999"])
def test_a_slip_of_the_finger_starts_no_processes(devices, tmp_path):
    with pytest.raises(ConfigurationError, match="`devices=99999999` is more than a machine with"):
        FederatedLoop(max_rounds=1, local_steps=1, devices=devices, accelerator="cpu", out_dir=tmp_path)
