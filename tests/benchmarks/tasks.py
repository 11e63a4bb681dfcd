"""What is timed: a module, its clients and how much each does in a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from lightning_feddua.data.partition import Partition
from lightning_feddua.models import CharLSTM, FemnistCNN, LinearRegression
from lightning_feddua.models.classifier import Classifier


@dataclass(frozen=True)
class Task:
    """A federation to time.

    Args:
        make_model: makes the module.
        sizes: the number of samples of each client.
        inputs: makes that many inputs.
        classes: the number of classes; None for regression.
        batch_size: the size of a minibatch.
        clients_per_round: the size of a cohort.
        steps: local steps of each client.
    """

    make_model: Callable[[], LightningModule]
    sizes: tuple[int, ...]
    inputs: Callable[[int], torch.Tensor]
    classes: int | None
    batch_size: int = 50
    clients_per_round: int = 20
    steps: int = 20

    def clients(self) -> Partition:
        """The clients, with random data."""
        torch.manual_seed(0)
        total = sum(self.sizes)
        targets = torch.randn(total, 1) if self.classes is None else torch.randint(self.classes, (total,))
        dataset = TensorDataset(self.inputs(total), targets)
        return Partition(dataset, [str(i) for i in range(len(self.sizes))], np.arange(total), np.array(self.sizes))


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
    "linear": Task(lambda: LinearRegression(1000, lr=0.01), (30,) * 20, lambda n: torch.randn(n, 1000), None, 30),
    "mlp": Task(MLP, _UNEQUAL, lambda n: torch.rand(n, 784), 62),
    "cnn": Task(lambda: _without_dropout(FemnistCNN(lr=0.01)), (150,) * 100, lambda n: torch.rand(n, 1, 28, 28), 62),
    "lstm": Task(
        lambda: _without_dropout(CharLSTM(lr=0.1)),
        (200,) * 100,
        lambda n: torch.randint(79, (n, 80), dtype=torch.uint8),
        79,
    ),
}
