"""Ranks with gloo: their number changes nothing but the time.

They are forked with torchrun's environment, which takes no time; a slow test has a real torchrun start them.
"""

import os
import subprocess
import sys

import pytest
import torch

from lightning_feddua.cli import main as feddua
from tests.distributed import train
from tests.forked_ranks import ForkedRanks

WORLD_SIZES = (1, 2, 3)


def torchrun(*arguments, processes, module="tests.distributed.train"):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, "-m", module, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folders = {n: tmp_path_factory.mktemp(f"ranks{n}") for n in WORLD_SIZES}
    for n, folder in folders.items():
        ranks = ForkedRanks(lambda folder=folder: train.main(folder), n, folder)
        assert ranks.wait() == [0] * n, ranks.output(0)
    return {n: read(folder) for n, folder in folders.items()}


def read(folder):
    return {run["name"]: run for run in torch.load(folder / "results.pt", weights_only=True)}


@pytest.mark.slow
def test_a_real_torchrun_gives_the_same_runs(results, tmp_path):
    finished = torchrun(tmp_path, processes=2)
    assert finished.returncode == 0, finished.stderr
    for name, run in read(tmp_path).items():
        expected = results[2][name]
        assert run["collectives"] == expected["collectives"]
        assert repr(run["history"]) == repr(expected["history"])
        assert all(torch.equal(value, expected["state"][key]) for key, value in run["state"].items())


@pytest.mark.parametrize("run", ["partial", "idle rank", "classifier"])
@pytest.mark.parametrize("ranks", WORLD_SIZES[1:])
def test_same_cohorts_minibatches_and_weights(results, run, ranks):
    one, many = results[1][run], results[ranks][run]
    assert (one["world_size"], many["world_size"]) == (1, ranks)
    assert one["cohorts"] == many["cohorts"]
    assert len({tuple(cohort) for cohort in one["cohorts"]}) > 1
    for a, b in zip(one["history"], many["history"], strict=True):
        assert a == pytest.approx(b, rel=1e-10, abs=1e-12)
    for name, value in one["state"].items():
        torch.testing.assert_close(many["state"][name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("run", ["partial", "idle rank", "classifier"])
@pytest.mark.parametrize("ranks", WORLD_SIZES[1:])
def test_one_all_reduce_a_round(results, run, ranks):
    collectives = results[ranks][run]["collectives"]
    # The names of the metrics are learnt in the first round: their length, and they.
    assert collectives[0] == {"all_reduce": 1, "other": 2}
    assert collectives[1:] == [{"all_reduce": 1, "other": 0}] * 19


def test_devices_that_do_not_match_torchrun(tmp_path):
    out_dir = tmp_path / "runs"
    arguments = ["fit", "--config", "synthetic", "--loop.devices", "3", "--loop.out_dir", str(out_dir)]
    ranks = ForkedRanks(lambda: sys.exit(feddua(arguments)), 2, tmp_path)
    assert 0 not in ranks.wait()
    assert "`devices=3` does not match torchrun, which started 2 processes on this node. Leave" in ranks.output(0)
    assert not out_dir.exists()


@pytest.mark.slow
def test_cli_under_torchrun_writes_one_run(tmp_path):
    settings = ["--loop.max_rounds", 2, "--data.dim", 50, "--model.dim", 50, "--loop.out_dir", tmp_path]
    finished = torchrun("fit", "--config", "synthetic", *settings, processes=2, module="lightning_feddua")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("results in") == 1
    assert "2 ranks: 2 x cpu" in finished.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version_0"]
    files = sorted(p.name for p in (tmp_path / "version_0").iterdir())
    assert files == ["last.ckpt", "metrics.csv", "recipe.yaml", "run.json"]
