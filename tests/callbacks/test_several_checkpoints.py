"""Rounds that are kept by several metrics."""

from functools import partial
from pathlib import Path

import lightning.pytorch
import pytest
import torch

from lightning_feddua import ConfigurationError, FedDuAdam
from lightning_feddua.callbacks import Checkpoint
from lightning_feddua.checkpoints.files import read
from tests.callbacks.test_early_stopping import Scores
from tests.checkpoints.checkpointed_runs import assert_same, fit, make

ModelCheckpoint = lightning.pytorch.callbacks.ModelCheckpoint
LOW, HIGH = [3.0, 1.0, 2.0, 4.0], [0.1, 0.5, 0.2, 0.3]


@pytest.fixture
def make_loop(tmp_path):
    return partial(make, out_dir=tmp_path, engine="sequential")


def scores(low=LOW, high=HIGH):
    return [Scores(low, "low"), Scores(high, "high")]


def files(loop):
    return sorted(path.name for path in loop.run_dir.glob("*.ckpt"))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", [Checkpoint, ModelCheckpoint])
def test_each_keeps_its_best(make_loop, kind, devices):
    """They agree on a round in the one run, which the first gives up in the other."""
    ranks = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    for low, high, kept in (
        (LOW, HIGH, [2, 2]),
        ([3.0, 1.0, 0.5, 4.0], HIGH, [3, 2]),
        (LOW, [0.1, 0.2, 0.3, 0.4], [2, 4]),
    ):
        both = kind(monitor="low", mode="min"), kind(monitor="high", mode="max")
        loop = make_loop(callbacks=[*both, *scores(low, high)], **ranks)
        fit(loop)
        names = [f"round-{number:04d}.ckpt" for number in kept]
        assert files(loop) == sorted({"last.ckpt", *names})
        assert [Path(one.best_model_path).name for one in both] == names
        assert [Path(one.last_model_path) for one in both] == [loop.run_dir / "last.ckpt"] * 2
        assert [float(one.best_model_score) for one in both] == pytest.approx([min(low), max(high)])


def test_a_resumed_run_knows_what_each_has_kept(make_loop, tmp_path):
    def checkpoints():
        return [Checkpoint(monitor="low", mode="min"), Checkpoint(monitor="high", mode="max")]

    whole = checkpoints()
    expected = fit(make_loop(callbacks=[*whole, *scores()], out_dir=tmp_path / "whole"))
    fit(make_loop(callbacks=[*checkpoints(), *scores()], max_rounds=2))
    resumed = checkpoints()
    assert_same(fit(make_loop(callbacks=[*resumed, *scores()]), ckpt_path="last"), expected)
    assert [one.best_model_score for one in resumed] == [one.best_model_score for one in whole] == [1.0, 0.5]


def test_one_writes_what_the_run_is_resumed_from(make_loop):
    """As often as any asks for it."""
    best = Checkpoint(every=1, monitor="low", mode="min", save_last=False)
    loop = make_loop(callbacks=[best, *scores()], checkpoint_every=3, max_rounds=4)
    fit(loop)
    assert files(loop) == ["last.ckpt", "round-0002.ckpt"]
    assert read(loop.run_dir / "last.ckpt")["epoch"] == 4


def test_two_iterates_of_a_round_have_a_file_each(make_loop):
    plain, last = (Checkpoint(monitor=f"{prefix}val_loss", save_top_k=-1) for prefix in ("", "last_iterate/"))
    loop = make_loop(callbacks=[plain, last], server=FedDuAdam(), max_rounds=1)
    fit(loop)
    assert files(loop) == ["last.ckpt", "round-0001-weights.ckpt", "round-0001.ckpt"]
    averaged, weights = (read(Path(one.best_model_path)) for one in (plain, last))
    assert not torch.equal(averaged["state_dict"]["net.0.weight"], weights["state_dict"]["net.0.weight"])


def test_lightnings_callback_keeps_a_round_when_it_is_its_turn(make_loop):
    """As under Trainer: with three rounds and `every_n_epochs=2`, the last is no candidate."""
    callback = ModelCheckpoint(monitor="low", every_n_epochs=2, save_top_k=-1)
    loop = make_loop(callbacks=[callback, *scores()], max_rounds=3)
    fit(loop)
    assert files(loop) == ["last.ckpt", "round-0002.ckpt"]
    assert read(loop.run_dir / "last.ckpt")["epoch"] == 3


def test_files_without_the_run_are_refused(make_loop):
    with pytest.raises(ConfigurationError, match=r"`ModelCheckpoint\(save_weights_only=True\)` would keep files that"):
        make_loop(callbacks=ModelCheckpoint(save_weights_only=True))
