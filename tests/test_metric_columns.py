"""A name that training and validation both log has a column for each."""

import csv

import torch
from torch import nn

from lightning_feddua import FedAvg, FedDuAdagrad
from lightning_feddua.metric_names import CERTIFICATE, LOOP_COLUMNS, ColumnOwners
from tests.modules import Classifier


class SameNames(Classifier):
    """Logs `loss` and `acc` in both steps, as many modules do."""

    def training_step(self, batch, batch_idx):
        return self._log(batch)

    def validation_step(self, batch, batch_idx):
        self._log(batch)

    def _log(self, batch):
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        self.log("acc", (logits.argmax(1) == batch[1]).float().mean())
        return loss


def test_training_and_validation_have_columns_of_their_own(make_loop, clients):
    loop = make_loop(server=FedAvg(), validate_every=2, max_rounds=4, engine="sequential")
    model = SameNames(dropout=0.0)
    loop.fit(model, clients)
    assert all({"loss", "acc"} <= row.keys() for row in loop.history)
    assert [{"val/loss", "val/acc"} <= row.keys() for row in loop.history] == [False, True, False, True]
    model.eval()
    x, y = clients.val_dataset.tensors
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model.net(x), y).item()
    assert abs(loop.history[-1]["val/loss"] - expected) < 1e-6
    assert loop.history[-1]["loss"] != loop.history[-1]["val/loss"]
    header = next(csv.reader((loop.run_dir / "metrics.csv").open()))
    assert len(header) == len(set(header))


def test_the_last_iterate_too(make_loop, clients):
    loop = make_loop(server=FedDuAdagrad(), max_rounds=2, engine="sequential")
    loop.fit(SameNames(dropout=0.0), clients)
    assert {"loss", "val/loss", "last_iterate/val/loss"} <= loop.history[-1].keys()


def test_a_name_stays_what_it_was():
    """Also where training does not log it in each round."""
    columns = ColumnOwners()
    # No client has finished the first round, so that there is no training loss yet.
    assert columns.validation({"loss": 1.0, "acc": 1.0}) == {"val/loss": 1.0, "acc": 1.0}
    resumed = ColumnOwners()
    resumed.load_state_dict(columns.state_dict())
    for owners in (columns, resumed):
        assert owners.training({"loss": 2.0, "acc": 2.0, "mae": 2.0}) == {"loss": 2.0, "train/acc": 2.0, "mae": 2.0}
        assert owners.validation({"loss": 1.0, "acc": 1.0}) == {"val/loss": 1.0, "acc": 1.0}
        assert owners.validation({"mae": 1.0, "val_loss": 1.0}) == {"val/mae": 1.0, "val_loss": 1.0}


def test_no_value_takes_the_place_of_another():
    assert ColumnOwners().validation({"loss": 1.0, "val/loss": 2.0}) == {"val/val/loss": 1.0, "val/loss": 2.0}


class Late(Classifier):
    """Logs `acc` in training from the second round on."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.trainer.current_round:
            self.log("acc", torch.tensor(2.0))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("acc", torch.tensor(1.0))


def test_a_column_is_never_both(make_loop, clients):
    loop = make_loop(server=FedAvg(), max_rounds=3, engine="sequential")
    loop.fit(Late(), clients)
    assert [row["acc"] for row in loop.history] == [1.0] * 3
    assert [row.get("train/acc") for row in loop.history] == [None, 2.0, 2.0]
    resumed = make_loop(server=FedAvg(), max_rounds=4, engine="sequential")
    resumed.fit(Late(), clients, loop.run_dir / "last.ckpt")
    assert resumed.history[-1]["acc"] == 1.0
    assert resumed.history[-1]["train/acc"] == 2.0


def test_the_columns_of_the_loop_are_known_by_their_names(make_loop, clients):
    """What the loop writes is what modules may not log, and no method's result."""
    loop = make_loop(on_client_error="skip", max_rounds=1, validate_every=0)
    loop.fit(Classifier(), clients)
    assert set(loop.history[0]) - {"loss", "train_acc"} == LOOP_COLUMNS - {CERTIFICATE}
    assert (loop.run_dir / "metrics.csv").read_text().splitlines()[0].split(",")[-1] == CERTIFICATE
