"""Which metric a monitor means."""

import lightning.pytorch
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_feddua import ConfigurationError, FedAvg, FedDuAdam, FederatedDataModule
from lightning_feddua.callbacks import Checkpoint, EarlyStopping
from tests.modules import Classifier, classification
from tests.trainers import quiet_trainer

ModelCheckpoint = lightning.pytorch.callbacks.ModelCheckpoint
Stopping = lightning.pytorch.callbacks.EarlyStopping


class SameName(Classifier):
    """Training says 10, 11, 12, … of ``acc``; validation what it is told."""

    def __init__(self, values):
        super().__init__(dropout=0.0)
        self.values = values
        self.register_buffer("rounds", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("acc", 10.0 + self.rounds)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("acc", self.values[int(self.rounds)])

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.rounds += 1


def data(held_out=True):
    return FederatedDataModule({"a": classification(16)}, classification(8) if held_out else None, batch_size=8)


VALUES = [0.5, 0.9, 0.7, 0.6]


def trainers(tmp_path):
    """The best model of the real Trainer, and the epoch in which it stops."""
    callbacks = [
        ModelCheckpoint(tmp_path / "trainer", "{acc:.1f}", "acc", mode="max"),
        Stopping("acc", 0.0, 2, mode="max"),
    ]
    trainer = quiet_trainer(max_epochs=4, callbacks=callbacks, num_sanity_val_steps=0, enable_checkpointing=True)
    trainer.fit(SameName(VALUES), DataLoader(classification(16), 8), DataLoader(classification(8), 8))
    return callbacks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("server", [FedAvg, FedDuAdam])
def test_a_name_that_training_and_validation_log_means_validations(make_loop, tmp_path, server):
    expected, stopped = trainers(tmp_path)
    best = ModelCheckpoint(tmp_path / "ours", "{acc:.1f}", "acc", mode="max")
    stopping = Stopping("acc", 0.0, 2, mode="max")
    loop = make_loop(
        server=server(), max_rounds=4, local_epochs=1, engine="sequential", callbacks=[best, stopping],
        num_sanity_val_steps=0,
    )  # fmt: skip
    loop.fit(SameName(VALUES), data())
    assert best.best_model_score == expected.best_model_score == torch.tensor(0.9)
    assert best.best_model_path.endswith("acc=0.9.ckpt")
    assert expected.best_model_path.endswith("acc=0.9.ckpt")
    assert stopping.stopped_epoch == stopped.stopped_epoch == 3
    assert stopping.best_score == stopped.best_score


def test_before_the_first_validation_nothing_is_compared(make_loop):
    best = Checkpoint(monitor="acc", mode="max", save_top_k=-1)
    loop = make_loop(max_rounds=4, local_epochs=1, engine="sequential", callbacks=best, validate_every=2)
    loop.fit(SameName(VALUES), data())
    assert list(best.best_k_models.values()) == pytest.approx([0.9, 0.5])
    # Resumed, it still knows.
    again = Checkpoint(monitor="acc", mode="max", save_top_k=-1)
    resumed = make_loop(max_rounds=5, local_epochs=1, engine="sequential", callbacks=again, validate_every=2)
    resumed.fit(SameName(VALUES), data(), ckpt_path="last")
    assert list(again.best_k_models.values()) == pytest.approx([0.9, 0.7, 0.5])


@pytest.mark.parametrize("suffix", ["", "_epoch", "_step"])
def test_names_that_trainer_gives_to_steps_and_epochs(make_loop, suffix):
    stopping = EarlyStopping(f"train/loss{suffix}", patience=9)
    loop = make_loop(max_rounds=2, local_epochs=1, engine="sequential", callbacks=stopping)
    loop.fit(SameName(VALUES), data())
    assert stopping.best_score == min(row["train/loss"] for row in loop.history)


@pytest.mark.parametrize(
    ("callback", "name"),
    [(Stopping("val_los"), "EarlyStopping"), (ModelCheckpoint(monitor="val_los"), "ModelCheckpoint")],
)
def test_errors_speak_of_the_users_callback_and_of_the_modules_metrics(make_loop, callback, name):
    with pytest.raises(ConfigurationError) as caught:
        make_loop(callbacks=callback, max_rounds=1).fit(Classifier(), data())
    assert str(caught.value).startswith(f"`{name}` monitors `val_los`, which is not logged. Choose one of `last")
    assert not any(own in str(caught.value) for own in ("seconds", "eta_g", "heterogeneity"))


@pytest.mark.parametrize("callback", [Stopping("val_loss"), Checkpoint(monitor="last_iterate/val_loss")])
@pytest.mark.parametrize(("validate_every", "held_out"), [(0, True), (1, False)])
def test_a_metric_of_validation_in_a_run_without_any_is_refused_before_work(
    make_loop, callback, validate_every, held_out
):
    loop = make_loop(callbacks=callback, validate_every=validate_every)
    with pytest.raises(ConfigurationError, match=r"monitors `.*val_loss`, but nothing is validated: .*\. Validate, or"):
        loop.fit(Classifier(), data(held_out))
    assert loop.history == []
