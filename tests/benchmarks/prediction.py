"""How well the choice of an engine is predicted: the predicted speed of stacks beside the measured one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from unittest import mock

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_feddua import FedAvg, FederatedDataModule, FederatedLoop
from lightning_feddua.engines import trial
from lightning_feddua.engines.prediction import predicted_speedup

_STEPS = 4


class Trained(LightningModule):
    """Any network with a loss."""

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], adam: bool = False) -> None:
        super().__init__()
        self.network, self.loss, self.adam = network, loss, adam

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return (torch.optim.Adam if self.adam else torch.optim.SGD)(self.parameters(), lr=0.01)


class Sequence(nn.Module):
    """Tokens to a class, by a transformer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(79, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, 79)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.layers(self.embedding(x)).mean(1))


def _mlp(*widths: int) -> nn.Module:
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())))


def _cnn(first: int, second: int, side: int, width: int) -> nn.Module:
    inner = second * ((side - 4) // 2) ** 2
    convolutions = [nn.Conv2d(1, first, 3), nn.ReLU(), nn.Conv2d(first, second, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(inner, width), nn.ReLU(), nn.Linear(width, 10))


@dataclass
class _Case:
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    clients: int
    adam: bool = False

    def data(self) -> TensorDataset:
        if len(self.shape) == 1 and self.shape[0] < 60:
            return TensorDataset(torch.randint(79, (self.batch, *self.shape)), torch.randint(79, (self.batch,)))
        return TensorDataset(torch.randn(self.batch, *self.shape), torch.randint(10, (self.batch,)))


CASES = {
    "MLP 60-50-10": _Case(lambda: _mlp(60, 50, 10), (60,), 20, 20),
    "MLP 60-50-10, Adam": _Case(lambda: _mlp(60, 50, 10), (60,), 20, 20, adam=True),
    "MLP 784-200-62": _Case(lambda: _mlp(784, 200, 62), (784,), 50, 20),
    "MLP 784-200-62, batch of 10": _Case(lambda: _mlp(784, 200, 62), (784,), 10, 20),
    "MLP of 7 layers of 64": _Case(lambda: _mlp(*[64] * 8), (64,), 32, 20),
    "MLP of 3 layers of 1024": _Case(lambda: _mlp(1024, 1024, 1024, 10), (1024,), 64, 10),
    "CNN 4-8": _Case(lambda: _cnn(4, 8, 12, 16), (1, 12, 12), 16, 20),
    "CNN 16-32": _Case(lambda: _cnn(16, 32, 28, 64), (1, 28, 28), 10, 10),
    "CNN 32-64": _Case(lambda: _cnn(32, 64, 28, 128), (1, 28, 28), 20, 6),
    "transformer 32": _Case(lambda: Sequence(32, 2), (16,), 8, 10),
    "transformer 128": _Case(lambda: Sequence(128, 2), (32,), 16, 8),
}


def prediction_table(repetitions: int) -> str:
    """Predicted and measured speed of stacks over one by one, as a Markdown table."""
    rows = ["| model | clients | predicted | measured | chosen is at least as fast |", "|---|---|---|---|---|"]
    for name, case in CASES.items():
        predicted, measured = _measure(case, repetitions)
        right = "yes" if (predicted >= 1.1) == (measured >= 1.0) else f"no, by {max(measured, 1 / measured):.2f}"
        rows.append(f"| {name} | {case.clients} | {predicted:.2f} | {measured:.2f} | {right} |")
    return "\n".join(rows)


def _measure(case: _Case, repetitions: int) -> tuple[float, float]:
    """The predicted speed of a stack over one by one, and the measured one."""
    torch.manual_seed(0)
    found = []
    data = FederatedDataModule({str(i): case.data() for i in range(case.clients)}, batch_size=case.batch)

    def compared(federation, sequential, vectorized, clients, state, auto):
        result = compare(federation, sequential, vectorized, clients, state, auto)
        times = [
            (_seconds(sequential, clients[:2], state) / 2, _seconds(vectorized, clients, state) / len(clients))
            for _ in range(repetitions + 1)
        ][1:]
        vectorized.release()
        alone, together = (min(column) for column in zip(*times, strict=True))
        found.append(alone / together)
        return result

    def predicted(*arguments):
        found.append(predicted_speedup(*arguments))
        return found[-1]

    compare = trial._compare
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(trial, "_compare", compared),
        mock.patch.object(trial, "predicted_speedup", predicted),
    ):
        loop = FederatedLoop(
            server=FedAvg(), max_rounds=0, local_steps=_STEPS, out_dir=folder, enable_progress_bar=False
        )
        loop.fit(Trained(case.network(), nn.functional.cross_entropy, case.adam), data)
    measured, guess = found
    return guess, measured


def _seconds(engine, clients, state) -> float:
    start = time.perf_counter()
    trial._deltas(engine, clients, state)
    return time.perf_counter() - start
