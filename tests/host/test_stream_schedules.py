"""Schedules of clients that are DataLoaders or streams, which count their own batches."""

import math

import pytest
import torch
from lightning import Trainer
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from lightning_feddua import FedAvg, FederatedDataModule
from lightning_feddua.data.splits import make_partition
from lightning_feddua.data.streams import WeightedPartition, work_sizes
from tests.modules import Classifier, classification


class Stream(IterableDataset):
    """Does not tell its length."""

    def __init__(self, size):
        self.samples = classification(size)

    def __iter__(self):
        return iter(self.samples)


class Asks(Classifier):
    """Notes how long training is, when it makes optimizers and in the client, and which batches are the last."""

    def __init__(self):
        super().__init__(dropout=0.0)
        FOUND.clear()

    def note(self):
        trainer = self.trainer
        FOUND.append((trainer.estimated_stepping_batches, trainer.num_training_batches, trainer.max_epochs))

    def on_train_start(self):
        self.note()

    def on_train_batch_end(self, *args):
        FOUND.append(self.trainer.is_last_batch)

    def configure_optimizers(self):
        self.trainer.estimated_stepping_batches  # noqa: B018  Trainer knows the length of a pass only after this.
        self.note()
        return torch.optim.SGD(self.net.parameters(), 0.1)


FOUND = []


def found_in_loop(make_loop, client, **work):
    make_loop(server=FedAvg(), max_rounds=1, **work).fit(Asks(), FederatedDataModule({"a": client}, batch_size=8))
    return list(FOUND)


def found_in_trainer(loader, tmp_path, **work):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(accelerator="cpu", enable_model_summary=False, default_root_dir=tmp_path, **quiet, **work).fit(
        Asks(), loader
    )
    return list(FOUND)


@pytest.mark.parametrize("limit", [None, 2])
def test_passes_over_a_stream_of_unknown_length_as_under_trainer(make_loop, tmp_path, limit):
    found = found_in_loop(make_loop, Stream(20), local_steps=None, local_epochs=2, limit_train_batches=limit)
    assert found == found_in_trainer(
        DataLoader(Stream(20), 8), tmp_path, max_epochs=2, limit_train_batches=limit or 1.0
    )
    assert found[0] == found[1] == ((-1, math.inf, 2) if limit is None else (4, 2, 2))


def test_steps_on_a_stream_of_unknown_length_as_under_trainer(make_loop, tmp_path):
    found = found_in_loop(make_loop, Stream(20), local_steps=4)
    assert (
        found[:2] == found_in_trainer(DataLoader(Stream(20), 8), tmp_path, max_steps=4)[:2] == [(4, math.inf, -1)] * 2
    )


@pytest.mark.parametrize("batch_size", [2, 40])
def test_a_dataloader_counts_its_own_batches(make_loop, tmp_path, batch_size):
    loader = DataLoader(classification(40), batch_size)
    found = found_in_loop(make_loop, loader, local_steps=None, local_epochs=2)
    assert found == found_in_trainer(DataLoader(classification(40), batch_size), tmp_path, max_epochs=2)
    assert found[0] == (80 // batch_size, 40 // batch_size, 2)


def test_each_has_the_schedule_of_its_own_batches(make_loop):
    class OneCycle(Classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
            made.append(self.trainer.estimated_stepping_batches)
            scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=made[-1])
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    made = []
    clients = {"a": DataLoader(classification(40), 2), "b": classification(37), "c": DataLoader(classification(40), 40)}
    make_loop(server=FedAvg(), max_rounds=2, local_steps=None, local_epochs=1).fit(
        OneCycle(), FederatedDataModule(clients, batch_size=8)
    )
    assert sorted(made) == [1, 5, 20]


def test_clients_that_draw_by_weight_count_their_draws():
    samples = classification(30)
    loader = DataLoader(samples, 5, sampler=WeightedRandomSampler([1.0] * 30, 60))
    plain = make_partition(samples, [list(range(10)), list(range(10, 30))], None)
    weighted = WeightedPartition(plain, loader)
    assert work_sizes(plain, lambda: plain.sizes, 5).tolist() == [10, 20]
    assert work_sizes(weighted, lambda: plain.sizes, 5).tolist() == [20, 40]
