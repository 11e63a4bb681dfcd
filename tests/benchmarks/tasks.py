"""What is timed: a module, its clients and how much each does in a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from lightning_feddua.data.client_data import minibatches
from lightning_feddua.data.partition import Partition
from lightning_feddua.models import CharLSTM, FemnistCNN, LinearRegression
from lightning_feddua.models.classifier import Classifier
from lightning_feddua.randomness import Purpose, generator
from lightning_feddua.sampling import sample_cohort
from tests.benchmarks.work import Work


@dataclass(frozen=True)
class Task:
    """A federation to time.

    Args:
        name: its name in `TASKS`.
        make_model: makes the module.
        sizes: the number of samples of each client.
        inputs: makes that many inputs.
        classes: the number of classes; None for regression.
        batch_size: the size of a minibatch.
        clients_per_round: the size of a cohort.
        steps: local steps of each client, or
        epochs: its passes over its data; the two are exclusive, and only the loop itself can be timed by epochs.
    """

    name: str
    make_model: Callable[[], LightningModule]
    sizes: tuple[int, ...]
    inputs: Callable[[int], torch.Tensor]
    classes: int | None
    batch_size: int = 50
    clients_per_round: int = 20
    steps: int = 20
    epochs: int | None = None

    def clients(self) -> Partition:
        """The clients, with random data."""
        torch.manual_seed(0)
        total = sum(self.sizes)
        targets = torch.randn(total, 1) if self.classes is None else torch.randint(self.classes, (total,))
        dataset = TensorDataset(self.inputs(total), targets)
        return Partition(dataset, [str(i) for i in range(len(self.sizes))], np.arange(total), np.array(self.sizes))

    def initial_model(self) -> LightningModule:
        """The module, with the same weights every time."""
        torch.manual_seed(0)
        return self.make_model()

    def work(self, rounds: int) -> Work:
        """What `FederatedLoop(seed=0)` does in so many rounds, written out."""
        clients, model = self.clients(), self.initial_model()
        inputs, targets = clients.dataset.tensors
        rows = [
            [
                [
                    clients.rows(i)[positions]
                    for _, positions in minibatches(
                        int(clients.sizes[i]),
                        self.batch_size,
                        generator(0, round, i, Purpose.MINIBATCHES),
                        steps=self.steps,
                    )
                ]
                for i in sample_cohort(0, round, len(clients), self.clients_per_round)
            ]
            for round in range(rounds)
        ]
        settings = model.configure_optimizers().defaults
        return Work(
            self.name,
            flat(model).numpy(),
            inputs.numpy(),
            targets.numpy(),
            np.array(rows),
            settings["lr"],
            settings["weight_decay"],
        )


def flat(module: nn.Module) -> torch.Tensor:
    """The module's parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def task_of(work: Work) -> Task:
    """The task of which this is the work."""
    return replace(TASKS[work.task], clients_per_round=work.cohort_size, steps=work.steps)


class MLP(Classifier):
    """784-200-62."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 62)), 62, lr=0.1)


def _without_dropout(module: LightningModule) -> LightningModule:
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return module


_UNEQUAL = tuple(np.random.default_rng(0).integers(60, 201, size=100).tolist())
# Dropout is off, so that all variants compute the same updates.
TASKS = {
    task.name: task
    for task in (
        Task("linear", lambda: LinearRegression(1000, lr=0.01), (30,) * 20, lambda n: torch.randn(n, 1000), None, 30),
        Task("mlp", MLP, _UNEQUAL, lambda n: torch.rand(n, 784), 62),
        Task(
            "cnn",
            lambda: _without_dropout(FemnistCNN(lr=0.01)),
            (150,) * 100,
            lambda n: torch.rand(n, 1, 28, 28),
            62,
        ),
        Task(
            "lstm",
            lambda: _without_dropout(CharLSTM(lr=0.1)),
            (200,) * 100,
            lambda n: torch.randint(79, (n, 80), dtype=torch.uint8),
            79,
        ),
        Task(
            "skewed",
            lambda: _without_dropout(FemnistCNN(lr=0.01)),
            (500,) + (50,) * 19,
            lambda n: torch.rand(n, 1, 28, 28),
            62,
            epochs=1,
        ),
        Task("many", lambda: LinearRegression(100, lr=0.01), (30,) * 1000, lambda n: torch.randn(n, 100), None, 30),
    )
}
# Those of the tables of rounds; the others are for scaling and skew.
ROUND_TASKS = ("linear", "mlp", "cnn", "lstm")
