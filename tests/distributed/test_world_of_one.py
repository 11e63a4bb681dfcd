"""Collectives of a module's own, on real ranks: each client is alone, as in its own Trainer."""

import os
import warnings
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import MeanMetric

from lightning_feddua import FedAvg, FedDuAdam
from lightning_feddua.clients import Mime
from tests.forked_ranks import ForkedRanks, assert_same, fit, run
from tests.modules import DropoutCNN


class Plain(DropoutCNN):
    """Gathers with torch's own functions, as code for many GPUs does."""

    def gathered(self, tensor):
        if not dist.is_initialized():
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def loss(self, batch):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        # Without a world of one this would mix the samples of two clients, and hang when one is done.
        return loss * (1 + self.gathered(batch[0]).mean())

    def training_step(self, batch, batch_idx):
        assert (self.trainer.world_size, self.global_rank, self.trainer.local_rank) == (1, 0, 0)
        assert self.trainer.is_global_zero
        return self.loss(batch)


class Everything(Plain):
    """Every collective there is, where there is a process group."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if dist.is_initialized():
            assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
            assert dist.get_process_group_ranks(dist.group.WORLD) == [0]
            value = loss.detach().clone()
            dist.all_reduce(value)
            dist.broadcast(value, src=0)
            dist.barrier()
            objects = [None]
            dist.all_gather_object(objects, "mine")
            assert objects == ["mine"]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                flat = torch.empty(1)
                dist.all_gather_into_tensor(flat, value.reshape(1))
            assert torch.equal(value, loss.detach())
        return loss


class Contrastive(DropoutCNN):
    """A loss over the pairs of all gathered samples."""

    def training_step(self, batch, batch_idx):
        z = nn.functional.normalize(self.net(batch[0]), dim=1)
        everyone = self.all_gather(z, sync_grads=True)
        assert everyone.shape == z.shape
        return nn.functional.cross_entropy(z @ everyone.T / 0.1, torch.arange(len(z)))


class ScaledRate(DropoutCNN):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05 * self.trainer.world_size * self.trainer.num_devices)


class SyncedNorm(DropoutCNN):
    def __init__(self):
        super().__init__(batch_norm=True)
        self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)


class InValidation(Plain):
    """Validation is dealt to ranks by batches, of which there are not equally many."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        # Whole numbers, whose sum has the same bits in any order.
        self.mean.update(batch[1].float())
        self.log("val_loss", loss)
        # Computed by all ranks together, after the batches.
        self.log("val_mean", self.mean)


class InValidationsEnd(InValidation):
    """On every rank all batches."""

    def on_validation_epoch_end(self):
        self.log("gathered", self.gathered(torch.ones(2)).sum() + self.all_gather(torch.ones(3)).sum())


MODELS = [Plain, Everything, Contrastive, ScaledRate, SyncedNorm, InValidation, InValidationsEnd]


_SLOW = [
    model if model in (Everything, InValidationsEnd) else pytest.param(model, marks=pytest.mark.slow)
    for model in MODELS
]


@pytest.mark.parametrize("model", _SLOW, ids=lambda model: model.__name__)
def test_the_number_of_ranks_does_not_change_a_bit(tmp_path, model):
    arguments = {"server": FedDuAdam(), "local_epochs": 1, "max_rounds": 3}
    expected = run(1, tmp_path / "1", model, arguments)
    for world_size in (2, 3):
        assert_same(run(world_size, tmp_path / str(world_size), model, arguments), expected)


@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_other_gradients_and_the_trial_are_alone_too(tmp_path, engine):
    arguments = {"local_steps": 2, "max_rounds": 2, "engine": engine}
    expected = run(1, tmp_path / "1", Plain, {**arguments, "server": FedAvg(), "client": Mime()})
    assert_same(run(2, tmp_path / "2", Plain, {**arguments, "server": FedAvg(), "client": Mime()}), expected)


class Fails(Everything):
    """One client fails between its collectives."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if len(self.trainer.train_dataloader.dataset) == 20:
            raise ValueError("a bad client")
        return loss


def test_the_other_ranks_are_back_after_a_client_that_fails(tmp_path):
    arguments = {"server": FedAvg(), "local_epochs": 1, "max_rounds": 4, "on_client_error": "skip"}
    expected = run(1, tmp_path / "1", Fails, arguments)
    assert sum(row["skipped_clients"] for row in expected["history"]) > 0
    assert_same(run(2, tmp_path / "2", Fails, arguments), expected)


def test_a_failure_is_told_to_all_ranks(tmp_path):
    arguments = {"server": FedAvg(), "local_epochs": 1, "clients_per_round": None, "max_rounds": 1}
    ranks = ForkedRanks(lambda: fit(tmp_path, Fails, arguments), 2, tmp_path)
    assert ranks.wait(60) == [1, 1]
    outputs = [ranks.output(rank) for rank in range(2)]
    assert all("a bad client" in output for output in outputs)
    assert any("has failed: Client `3` failed in round 0" in output for output in outputs)


class TellsItsFolder(DropoutCNN):
    def on_train_start(self):
        with (self.folder / f"{os.getpid()}.txt").open("a") as file:
            print(self.trainer.log_dir, file=file)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_all_ranks_know_the_folder_that_the_first_chose(tmp_path, package):
    def model():
        module = TellsItsFolder()
        module.folder = tmp_path / "told"
        return module

    (tmp_path / "told").mkdir()
    logger = import_module(f"{package}.loggers").CSVLogger(tmp_path / "logs")
    run(2, tmp_path / "runs", model, {"local_steps": 1, "max_rounds": 2, "server": FedAvg(), "loggers": logger})
    told = [path.read_text().splitlines() for path in (tmp_path / "told").iterdir()]
    assert len(told) == 2
    assert {line for lines in told for line in lines} == {str(tmp_path / "logs/lightning_logs/version_0")}
    assert len((tmp_path / "logs/lightning_logs/version_0/metrics.csv").read_text().splitlines()) == 3
