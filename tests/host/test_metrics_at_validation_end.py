"""What hooks at the end of a validation see in ``trainer.callback_metrics``."""

import lightning.pytorch
import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader

from lightning_feddua import FedAvg, FedDuAdam, FederatedDataModule
from tests.modules import Classifier, classification
from tests.trainers import quiet_trainer

NAMES = ("acc", "val_loss", "val_acc", "seen", "metric", "begun", "late_metric")


class Logs(Classifier):
    """Logs in every hook of validation, with values that differ from one validation to the next."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.metric, self.late_metric = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.validations = 0

    def training_step(self, batch, batch_idx):
        self.log("acc", -1.0)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self):
        self.validations += 1
        self.log("begun", 10.0 * self.validations)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.metric(float(batch_idx + self.validations))
        self.log("metric", self.metric)
        self.log("acc", 1.0 * self.validations)

    def on_validation_epoch_end(self):
        self.log("seen", 100.0 * self.validations)
        self.late_metric(2.0 * self.validations)
        self.log("late_metric", self.late_metric)


class Notes(lightning.pytorch.Callback):
    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def trainers():
    notes = Notes()
    trainer = quiet_trainer(max_epochs=3, callbacks=notes, num_sanity_val_steps=0)  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(Logs(), DataLoader(classification(16), 16), DataLoader(classification(12, seed=1), 4))
    return notes.seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("devices", [1, 2])
def test_values_are_this_validations_as_under_trainer(make_loop, tmp_path, devices):
    notes = Notes()
    ranks = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    loop = make_loop(
        max_rounds=3, local_epochs=1, server=FedAvg(), engine="sequential", num_sanity_val_steps=0,
        callbacks=[notes, Saves(notes, tmp_path)], **ranks,
    )  # fmt: skip
    torch.manual_seed(0)
    data = FederatedDataModule({"a": classification(16)}, classification(12, seed=1), batch_size=16, eval_batch_size=4)
    loop.fit(Logs(), data)
    expected, found = trainers(), torch.load(tmp_path / "seen.pt")
    for theirs, ours, row in zip(expected, found, loop.history, strict=True):
        assert {name: ours[name] for name in NAMES if "val_" not in name} == {
            name: theirs[name] for name in NAMES if "val_" not in name
        }
        # The columns of the round, too.
        assert ours["val/acc"] == row["val/acc"] == theirs["acc"]
        assert ours["val_loss"] == pytest.approx(row["val_loss"])


class Saves(lightning.pytorch.Callback):
    """Brings home from a fork what another has noted."""

    def __init__(self, notes, folder):
        self.notes, self.folder = notes, folder

    def on_fit_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            torch.save(self.notes.seen, self.folder / "seen.pt")


def test_what_the_averaged_iterate_has_logged(make_loop):
    """Where two iterates are validated, the hooks see the one whose metrics have the plain names."""
    notes = Notes()
    loop = make_loop(max_rounds=2, local_epochs=1, server=FedDuAdam(), num_sanity_val_steps=0, callbacks=notes)
    data = FederatedDataModule({"a": classification(16)}, classification(12, seed=1), batch_size=16)
    loop.fit(Classifier(dropout=0.0), data)
    assert [seen["val_loss"] for seen in notes.seen] == pytest.approx([row["val_loss"] for row in loop.history])
