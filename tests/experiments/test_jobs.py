"""The processes of many runs: what one does to its own process is no other's business."""

import os
import random
import signal
import sys
import warnings

import numpy as np
import pytest
import torch

from lightning_feddua.checkpoints.files import read
from lightning_feddua.cli import main
from lightning_feddua.engines import SequentialEngine, register_engine
from lightning_feddua.experiments import jobs
from lightning_feddua.models import LinearRegression
from tests.experiments.test_compare import write_recipe


class Vandal(LinearRegression):
    """Leaves nothing of a process as it was."""

    counter = 0

    def __init__(self, dim: int, lr: float) -> None:
        super().__init__(dim, lr)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(99)
        warnings.simplefilter("error")
        os.environ["PL_GLOBAL_SEED"] = "99"
        LinearRegression.training_step = None
        register_engine(type("Other", (SequentialEngine,), {"name": "other"}))
        os.kill(os.getpid(), signal.SIGKILL)


def weights(folder):
    return read(folder / "version_0/last.ckpt")["state_dict"]


def test_a_job_that_ruins_its_process_and_dies_costs_itself_alone(tmp_path, capsys):
    vandal = {"model": {"class_path": f"{__name__}.Vandal", "init_args": {"dim": 8, "lr": 0.1}}}
    sound = {"server": {"class_path": "FedDuAdagrad"}}
    recipe = write_recipe(tmp_path / "tiny.yaml", Vandal=vandal, Sound=sound)
    for name, methods, code in (("both", ["Vandal", "Sound"], 1), ("alone", ["Sound"], 0)):
        arguments = ["compare", "--config", recipe, "--jobs", "1", "--out", str(tmp_path / name)]
        assert main([*arguments, "--methods", *methods]) == code
        if code:
            assert "Vandal seed 0  FAILED: it was killed before it said anything" in capsys.readouterr().out
    after, alone = (weights(tmp_path / name / "Sound/seed_0") for name in ("both", "alone"))
    assert all(torch.equal(after[name], alone[name]) for name in alone)
    assert main(["fit", "--config", recipe, "--preset", "Sound", "--loop.out_dir", str(tmp_path / "fit")]) == 0
    fitted = weights(tmp_path / "fit")
    assert all(torch.equal(fitted[name], alone[name]) for name in alone)


@pytest.mark.parametrize(("workers", "first"), [(1, "Short"), (2, "Long")])
def test_the_longest_run_starts_first_where_several_run_at_once(tmp_path, monkeypatch, workers, first):
    started = []
    start = jobs._start
    monkeypatch.setattr(jobs, "_start", lambda job, *others: started.append(job.name) or start(job, *others))
    methods = {"Short": {"loop": {"max_rounds": 1}}, "Medium": {}, "Long": {"loop": {"local_steps": 20}}}
    recipe = write_recipe(tmp_path / "tiny.yaml", **methods)
    assert (
        main(
            [
                "compare",
                "--config",
                recipe,
                "--jobs",
                str(workers),
                "--out",
                str(tmp_path / "out"),
                "--methods",
                *methods,
            ]
        )
        == 0
    )
    assert started[0] == f"{first} seed 0"
    assert len(started) == 3


def test_the_compiler_is_imported_once_for_all_jobs_that_need_it(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr(jobs, "COMPILER_MODULES", ["colorsys"])
    recipe = write_recipe(tmp_path / "tiny.yaml", Broken={"loop": {"clients_per_round": 99}})
    arguments = ["compare", "--config", recipe, "--out", str(tmp_path / "out")]
    for compiled in (False, True):
        # Fails before it would compile anything.
        assert main([*arguments, "--loop.engine", "auto", "--loop.compile", str(compiled)]) == 1
        assert ("colorsys" in sys.modules) == compiled
