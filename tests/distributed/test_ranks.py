"""Real ranks that die or hang in the middle of a run, and the same bits on any number of them."""

import os
import signal
import time

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from lightning_feddua import (
    FedAdam,
    FedAvg,
    FedDuAdagrad,
    FedDuAdam,
    FederatedCallback,
    FederatedDataModule,
    FederatedLoop,
    Scaffold,
)
from lightning_feddua.clients import AdaAlter, FedDualAvg, Mime, MimeLite, Scaffnew
from tests.forked_ranks import ForkedRanks
from tests.modules import Classifier, classification


class DropoutCNN(LightningModule):
    """What differs most easily between two runs: convolutions, dropout, and BatchNorm if asked for."""

    def __init__(self, batch_norm=False):
        super().__init__()
        norm = [nn.BatchNorm2d(4)] if batch_norm else []
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), *norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3))
        )

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def images(size, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (size,), generator=generator)
    return TensorDataset(torch.randn(size, 1, 8, 8, generator=generator) + y.view(-1, 1, 1, 1), y)


def unequal_clients():
    clients = {str(i): images(5 + 5 * i, seed=i) for i in range(11)}
    return FederatedDataModule(clients, images(50, seed=99), batch_size=10, eval_batch_size=16)


def fit(out_dir, model, arguments, ckpt_path=None, data=unequal_clients):
    """Run one rank; the first leaves weights, buffers and history in a file."""
    defaults = {"max_rounds": 20, "clients_per_round": 6, "engine": "sequential", "timeout": 60.0}
    fixed = {"out_dir": out_dir, "enable_progress_bar": False, "accelerator": "cpu"}
    torch.manual_seed(0)
    model = model()
    loop = FederatedLoop(**{**defaults, **fixed, **arguments})
    loop.fit(model, data(), ckpt_path)
    if loop.fabric.is_global_zero:
        history = [{k: v for k, v in row.items() if k != "seconds"} for row in loop.history]
        torch.save({"state": model.state_dict(), "history": history}, out_dir / "result.pt")


def run(world_size, out_dir, *arguments, **more):
    out_dir.mkdir(exist_ok=True)
    ranks = ForkedRanks(lambda: fit(out_dir, *arguments, **more), world_size, out_dir)
    assert ranks.wait(120) == [0] * world_size, [ranks.output(rank) for rank in range(world_size)]
    return torch.load(out_dir / "result.pt", weights_only=True)


def assert_same(first, second):
    assert first["state"].keys() == second["state"].keys()
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
    assert first["history"] == second["history"]


RUNS = {
    "plain": (DropoutCNN, lambda: {"server": FedDuAdagrad(), "local_epochs": 1}),
    "scaffold": (DropoutCNN, lambda: {"server": FedDuAdagrad(), "client": Scaffold(), "local_steps": 3}),
    "samples": (
        lambda: DropoutCNN(batch_norm=True),
        lambda: {"server": FedAdam(), "client_weights": "samples", "local_epochs": 1},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_number_of_ranks_does_not_change_a_bit(tmp_path, name):
    model, arguments = RUNS[name]
    expected = run(1, tmp_path / "1", model, arguments())
    assert len(expected["history"]) == 20
    for world_size in (2, 3, 4):
        assert_same(run(world_size, tmp_path / str(world_size), model, arguments()), expected)


@pytest.mark.parametrize("name", ["scaffold", "samples"])
def test_two_ranks_stop_and_three_go_on(tmp_path, name):
    model, arguments = RUNS[name]
    expected = run(1, tmp_path / "whole", model, {**arguments(), "max_rounds": 8})
    folder = tmp_path / "split"
    run(2, folder, model, {**arguments(), "max_rounds": 3, "checkpoint_every": 1})
    assert_same(run(3, folder, model, {**arguments(), "max_rounds": 8}, ckpt_path="last"), expected)


ALGORITHMS = {
    "Scaffold": (Scaffold, FedDuAdam, {}),
    "AdaAlter": (AdaAlter, FedDuAdam, {}),
    "Mime": (Mime, FedDuAdam, {}),
    "MimeLite": (lambda: MimeLite(statistics="adam"), FedDuAdam, {}),
    "Scaffnew": (Scaffnew, FedAvg, {"clients_per_round": None}),
    "FedDualAvg": (lambda: FedDualAvg(l1=0.01), FedAvg, {}),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_split_run_is_the_whole_run(tmp_path, name):
    client, server, more = ALGORITHMS[name]

    def arguments(**changes):
        return {"client": client(), "server": server(), "local_steps": 3, "max_rounds": 5, **more, **changes}

    expected = run(2, tmp_path / "whole", DropoutCNN, arguments())
    folder = tmp_path / "split"
    run(2, folder, DropoutCNN, arguments(max_rounds=2, checkpoint_every=1))
    assert_same(run(2, folder, DropoutCNN, arguments(), ckpt_path="last"), expected)


class Signal(FederatedCallback):
    """Sends its own process a signal in the third round."""

    def __init__(self, rank, number):
        self.rank, self.number = rank, number

    def on_round_start(self, loop, round):
        if (loop.fabric.global_rank, round) == (self.rank, 2):
            os.kill(os.getpid(), self.number)


def small_clients():
    return FederatedDataModule({str(i): classification(20, seed=i) for i in range(6)}, batch_size=10)


@pytest.mark.parametrize(
    ("number", "rank", "message"),
    [
        (signal.SIGSTOP, 1, "Rank 1 has ended, or not come to an exchange within the loop's `timeout`"),
        (signal.SIGSTOP, 0, "Rank 0, which keeps the ranks together, does not answer"),
        (signal.SIGKILL, 2, "Rank 2 has ended, or not come to an exchange"),
    ],
    ids=["stopped", "first stopped", "killed"],
)
def test_a_rank_that_is_missing_is_named(tmp_path, number, rank, message):
    arguments = {"clients_per_round": None, "local_steps": 2, "timeout": 3.0, "callbacks": Signal(rank, number)}
    ranks = ForkedRanks(lambda: fit(tmp_path, Classifier, arguments, data=small_clients), 3, tmp_path)
    start = time.monotonic()
    others = [other for other in range(3) if other != rank]
    ranks.wait(30, others)
    waited = time.monotonic() - start
    ranks.kill()
    assert [ranks.codes[other] for other in others] == [1, 1]
    # Who comes later may be told by the end of the one who was told first.
    assert any(f"RankError: {message}" in ranks.output(other) for other in others), [ranks.output(o) for o in others]
    assert all("RankError: " in ranks.output(other) for other in others)
    assert waited < 25
