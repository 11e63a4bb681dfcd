"""Validation and test on several datasets: names and values are Trainer's."""

import pytest
import torch
import torchmetrics
from lightning import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from lightning_feddua import ConfigurationError, FederatedDataModule
from tests.modules import Classifier, classification
from tests.trainers import quiet_trainer


class Several(Classifier):
    """Logs numbers and a Metric for each dataset, and something of all of them."""

    def __init__(self, metric=True):
        super().__init__(dropout=0.0)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro") if metric else None
        self.calls = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log(f"mean_{dataloader_idx}", logits.mean(), add_dataloader_idx=False)
        self.log("largest", logits.max(), reduce_fx="max")
        if self.accuracy is not None:
            self.accuracy(logits, batch[1])
            self.log("val_acc", self.accuracy)

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.calls.append((dataloader_idx, batch_idx, len(batch[0])))

    test_step = validation_step


class Stream(IterableDataset):
    def __init__(self, size, seed):
        self.samples = classification(size, seed)

    def __iter__(self):
        return iter(self.samples)


class Loaders(LightningDataModule):
    """Several validation loaders of different kinds."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds

    def train_dataloader(self):
        return DataLoader(classification(24), 6)

    def val_dataloader(self):
        return [LOADERS[kind]() for kind in self.kinds]


LOADERS = {
    "plain": lambda: DataLoader(classification(20, 1), 8),
    "dropped": lambda: DataLoader(classification(23, 2), 5, drop_last=True),
    "stream": lambda: DataLoader(Stream(11, 3), 4),
    "batches": lambda: DataLoader(classification(9, 4), batch_sampler=[[0, 3], [1, 2, 5], [8]]),
    "rows": lambda: DataLoader(classification(9, 4), 4, sampler=SubsetRandomSampler([2])),
    "by hand": lambda: DataLoader(
        classification(12, 5).tensors[0].new_zeros(3, 2, 4), None, collate_fn=lambda x: (x, y)
    ),
}
y = torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize("metric", [True, False])
@pytest.mark.parametrize(
    "kinds",
    [["plain"], ["plain", "dropped"], ["stream", "plain"], ["batches", "rows", "dropped"], ["by hand", "plain"]],
)
def test_names_and_values_are_those_of_trainer(make_loop, kinds, metric):
    model = Several(metric)
    trainer = quiet_trainer()
    theirs = trainer.validate(model, Loaders(kinds), verbose=False)
    expected = {name: value for part in theirs for name, value in part.items()}
    calls, model.calls = model.calls, []
    data = FederatedDataModule.from_datamodule(Loaders(kinds), [range(12), range(12, 24)])
    found = make_loop().validate(model, data)
    assert model.calls == calls
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("metric", [True, False])
@pytest.mark.parametrize("kinds", [["plain", "dropped"], ["stream", "plain"]])
def test_two_ranks_give_the_same(make_loop, kinds, metric):
    data = FederatedDataModule.from_datamodule(Loaders(kinds), [range(12), range(12, 24)])
    model = Several(metric)
    one = make_loop().validate(model, data)
    two = make_loop(strategy="ddp_fork", devices=2).validate(model, data)
    assert one == two


def test_datasets_of_a_federated_data_module(make_loop):
    sets = [classification(20, 1), classification(12, 2)]
    data = FederatedDataModule({"a": classification(9)}, val_dataset=sets, test_dataset=sets[0], eval_batch_size=8)
    loop, model = make_loop(max_rounds=1), Several(metric=False)
    loop.fit(model, data)
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1", "mean_1"} <= loop.history[0].keys()
    trainer = quiet_trainer()
    theirs = trainer.validate(model, data, verbose=False)
    assert loop.validate(model, data) == pytest.approx({k: v for part in theirs for k, v in part.items()}, rel=1e-6)
    assert "val_loss" in loop.test(model, data)
    # A list of samples is one dataset, as it always was.
    assert "val_loss" in loop.validate(model, FederatedDataModule({"a": sets[0]}, val_dataset=list(sets[1])))


def test_signatures_that_do_not_fit(make_loop):
    class Needs(Classifier):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            pass

    two = [classification(4), classification(4)]
    with pytest.raises(
        ConfigurationError, match=r"`Classifier.validation_step` takes no `dataloader_idx`, and there are"
    ):
        make_loop().fit(Classifier(), FederatedDataModule({"a": two[0]}, val_dataset=two))
    with pytest.raises(ConfigurationError, match=r"`Needs.validation_step` needs a `dataloader_idx`, and there is one"):
        make_loop().fit(Needs(), FederatedDataModule({"a": two[0]}, val_dataset=two[0]))

    class Mixes(Several):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("mixed", 1.0, add_dataloader_idx=False)

    with pytest.raises(ValueError, match=r"was called for the datasets 0 and 1, which would mix their values"):
        make_loop().validate(Mixes(), FederatedDataModule({"a": two[0]}, val_dataset=two))
