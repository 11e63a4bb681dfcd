"""Which rounds are kept, and what is in their files."""

import math
from datetime import timedelta
from functools import partial
from pathlib import Path

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader

from lightning_feddua import ConfigurationError, FedAvg, FedDuAdam
from lightning_feddua.callbacks import Checkpoint, EarlyStopping
from lightning_feddua.checkpoints.files import read
from tests.callbacks.test_early_stopping import Scores
from tests.checkpoints.checkpointed_runs import Scheduled, assert_same, clients, fit, make, rewrite, rows
from tests.modules import Classifier, classification
from tests.trainers import quiet_trainer

PACKAGES = [lightning.pytorch, pytorch_lightning]


@pytest.fixture
def make_loop(tmp_path):
    return partial(make, out_dir=tmp_path, engine="sequential")


def score_of(model, name, tmp_path):
    """What the real Trainer says of a model on the same validation data."""
    trainer = quiet_trainer(default_root_dir=tmp_path, enable_checkpointing=True)
    return trainer.validate(model, DataLoader(classification(30, seed=9), batch_size=16), verbose=False)[0][name]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("monitor", ["val_loss", "last_iterate/val_loss"])
@pytest.mark.parametrize("server", [FedAvg, FedDuAdam])
def test_the_best_checkpoint_is_the_best_model_and_resumes_the_run(make_loop, tmp_path, server, monitor, devices):
    """With BatchNorm, and for a rule whose averaged iterate is what is validated."""
    if server is FedAvg and monitor != "val_loss":
        pytest.skip("FedAvg has one iterate.")
    ranks = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    whole = make_loop(server=server(), max_rounds=8, out_dir=tmp_path / "whole", **ranks)
    expected = fit(whole)
    # Its later rounds are worse, so that the best one is in the middle.
    worse = Scores([-row[monitor] * (row["round"] == 3) for row in whole.history], "score")
    for name, callbacks in ((monitor, []), ("score", [worse])):
        checkpoint = Checkpoint(monitor=name, mode="min")
        loop = make_loop(server=server(), max_rounds=8, callbacks=[checkpoint, *callbacks], **ranks)
        fit(loop)
        best = min(loop.history, key=lambda row: row[name])
        path = Path(checkpoint.best_model_path)
        assert path == loop.run_dir / f"round-{best['round'] + 1:04d}.ckpt"
        assert checkpoint.best_model_score == best[name]
        assert sorted(p.name for p in loop.run_dir.glob("*.ckpt")) == ["last.ckpt", path.name]
        model = Scheduled.load_from_checkpoint(path, weights_only=True)
        of_last = name.startswith("last_iterate/")
        score = score_of(model, "val_loss", tmp_path)
        assert score == pytest.approx(best["last_iterate/val_loss" if of_last else "val_loss"], rel=1e-6)
        if server is FedDuAdam and not of_last:
            assert score != pytest.approx(best["last_iterate/val_loss"], rel=1e-6)
        resumed = make_loop(server=server(), max_rounds=8, **ranks)
        assert_same(fit(resumed, ckpt_path=path), expected)
        assert [{**row, "score": None} for row in rows(resumed)] == [{**row, "score": None} for row in rows(whole)]


class Logs(Classifier):
    """Logs given values, one in each epoch."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def validation_step(self, batch, batch_idx):
        self.log("score", torch.tensor(self.values[self.current_epoch]))


def kept_by_trainer(tmp_path, values, **arguments):
    callback = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "trainer", "{epoch}", "score", **arguments)
    trainer = quiet_trainer(
        max_epochs=len(values), callbacks=callback, num_sanity_val_steps=0, enable_checkpointing=True
    )
    trainer.fit(Logs(values), DataLoader(classification(8), 8), DataLoader(classification(8), 8))
    return callback


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("save_top_k", [1, 2, 0, -1])
def test_the_same_rounds_are_kept_as_trainer_keeps_epochs(make_loop, tmp_path, mode, save_top_k):
    values = [3.0, 1.0, 1.0, math.nan, 0.5, 4.0, 4.0, 2.0]
    expected = kept_by_trainer(tmp_path, values, mode=mode, save_top_k=save_top_k)
    for package in (None, *PACKAGES):
        arguments = {"monitor": "score", "mode": mode, "save_top_k": save_top_k}
        ours = Checkpoint(**arguments) if package is None else package.callbacks.ModelCheckpoint(**arguments)
        loop = make_loop(max_rounds=len(values), callbacks=[ours, Scores(values)])
        fit(loop)
        kept = {int(path.stem.removeprefix("round-")) - 1 for path in loop.run_dir.glob("round-*.ckpt")}
        assert kept == {int(Path(path).stem.removeprefix("epoch=")) for path in expected.best_k_models}
        assert set(ours.best_k_models) == {str(path) for path in loop.run_dir.glob("round-*.ckpt")}
        if save_top_k == 0:
            assert ours.best_model_score is None
            assert expected.best_model_score is None
            continue
        assert float(ours.best_model_score) == expected.best_model_score.item()
        epoch = int(Path(expected.best_model_path).stem.removeprefix("epoch="))
        assert ours.best_model_path == str(loop.run_dir / f"round-{epoch + 1:04d}.ckpt")
        assert ours.last_model_path == str(loop.run_dir / "last.ckpt")


def test_nothing_but_what_is_asked_for(make_loop):
    def files(**arguments):
        callback = Checkpoint(**arguments)
        loop = make_loop(max_rounds=3, callbacks=callback)
        fit(loop)
        return sorted(path.name for path in loop.run_dir.glob("*.ckpt")), Path(callback.best_model_path).name

    assert files() == (["last.ckpt"], "last.ckpt")
    assert files(every=None) == (["last.ckpt"], "last.ckpt")
    assert files(save_last=False) == (["round-0003.ckpt"], "round-0003.ckpt")
    assert files(save_top_k=2) == (["last.ckpt", "round-0002.ckpt", "round-0003.ckpt"], "round-0003.ckpt")
    assert files(save_top_k=2, every=2) == (["last.ckpt", "round-0002.ckpt", "round-0003.ckpt"], "round-0003.ckpt")
    assert files(save_top_k=0) == (["last.ckpt"], "last.ckpt")


def test_rounds_that_are_not_validated_do_not_compete(make_loop):
    callback = Checkpoint(monitor="val_loss", save_top_k=-1)
    loop = make_loop(max_rounds=5, validate_every=2, callbacks=callback)
    fit(loop)
    assert sorted(path.name for path in loop.run_dir.glob("round-*")) == [
        "round-0002.ckpt",
        "round-0004.ckpt",
        "round-0005.ckpt",
    ]


def test_a_run_that_is_stopped_keeps_its_best(make_loop):
    scores = Scores([3.0, 1.0, 2.0, 2.0, 2.0, 0.0])
    callback = Checkpoint(every=2, monitor="score", mode="min", save_last=False)
    loop = make_loop(max_rounds=6, callbacks=[scores, callback, EarlyStopping("score", mode="min")])
    fit(loop)
    assert len(loop.history) == 5
    assert callback.best_model_score == 1.0
    assert sorted(path.name for path in loop.run_dir.glob("*.ckpt")) == ["last.ckpt", "round-0002.ckpt"]
    assert read(loop.run_dir / "last.ckpt")["epoch"] == 5


@pytest.mark.parametrize("package", PACKAGES)
def test_lightnings_callback_says_where_and_how_files_are_named(make_loop, tmp_path, package):
    callback = package.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "mine", filename="{epoch:02d}-{score:.1f}", monitor="score", save_top_k=2
    )
    loop = make_loop(callbacks=[callback, Scores([3.0, 1.0, 2.0, 4.0])])
    model = fit(loop)
    names = ["epoch=01-score=1.0.ckpt", "epoch=02-score=2.0.ckpt"]
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == names
    assert callback.best_model_path == str(tmp_path / "mine" / names[0])
    assert callback.best_model_score.item() == 1.0
    assert callback.last_model_path == str(loop.run_dir / "last.ckpt")
    assert_same(fit(make_loop(), ckpt_path=callback.best_model_path), model)


def test_in_forked_ranks_and_from_there(make_loop):
    ours, theirs = Checkpoint(monitor="val_loss"), lightning.pytorch.callbacks.ModelCheckpoint(monitor="val_loss")
    for callback in (ours, theirs):
        loop = make_loop(callbacks=callback, devices=2, strategy="ddp_fork")
        fit(loop)
        best = min(loop.history, key=lambda row: row["val_loss"])
        assert float(callback.best_model_score) == pytest.approx(best["val_loss"])
        assert callback.best_model_path == str(loop.run_dir / f"round-{best['round'] + 1:04d}.ckpt")


@pytest.mark.parametrize(
    "arguments", [{"every_n_train_steps": 5}, {"train_time_interval": timedelta(1)}, {"save_on_exception": True}]
)
def test_saves_in_the_middle_of_a_round_are_refused(make_loop, arguments):
    callback = lightning.pytorch.callbacks.ModelCheckpoint(**arguments)
    with pytest.raises(ConfigurationError, match=r"would save in the middle of a (client|round)\. Use `every_n_epochs"):
        make_loop(callbacks=callback)


@pytest.mark.parametrize("arguments", [{"checkpoint_every": 2}, {"callbacks": Checkpoint()}])
def test_checkpoints_that_are_forbidden_and_asked_for(make_loop, arguments):
    with pytest.raises(ConfigurationError, match=r"`enable_checkpointing=False` forbids what .* asks for\. Leave"):
        make_loop(enable_checkpointing=False, **arguments)


def test_a_checkpoint_from_before_still_loads(make_loop, tmp_path):
    """The state of its callback had no folder and no file, and there was no entry for Lightning's callbacks."""
    first = make_loop(server=FedDuAdam(), max_rounds=2, checkpoint_every=1)
    fit(first)
    path = first.run_dir / "last.ckpt"

    def older(checkpoint):
        del checkpoint["callbacks"]
        checkpoint["federated"]["parts"]["lightning_feddua.callbacks.checkpoint.Checkpoint 0"] = {
            "monitor": None,
            "mode": "min",
            "scores": {"round-0001.ckpt": -1, "round-0002.ckpt": -2},
        }

    rewrite(path, older)
    expected = fit(make_loop(server=FedDuAdam(), out_dir=tmp_path / "whole"), None, clients())
    assert_same(fit(make_loop(server=FedDuAdam(), checkpoint_every=1), ckpt_path="last"), expected)
