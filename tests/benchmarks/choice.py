"""Whether the engine is chosen well: ten combinations of module, sizes of clients and work, on both engines."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_feddua import FedAvg, FederatedCallback, FederatedDataModule, FederatedLoop
from lightning_feddua.data.partition import Partition
from lightning_feddua.engines import trial
from lightning_feddua.engines.prediction import OneByOne, Together, counted, predicted_speedup
from tests.benchmarks.modules import TokenClassifier, Trained, cnn, mlp
from tests.benchmarks.report import markdown

ENGINES = ("sequential", "vectorized")


@dataclass
class Combination:
    """A module, its clients and their work.

    Args:
        network: makes the network.
        shape: that of a sample.
        sizes: the number of samples of each client.
        batch_size: the size of a minibatch.
        work: ``local_steps`` or ``local_epochs``.
        classes: the number of classes; None for regression.
        tokens: whether samples are tokens.
        adam: whether the optimizer is Adam.
    """

    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    sizes: Sequence[int]
    batch_size: int
    work: dict[str, int] = field(default_factory=dict)
    classes: int | None = 10
    tokens: bool = False
    adam: bool = False

    def clients(self) -> Partition:
        """The clients, with random data."""
        torch.manual_seed(0)
        total = sum(self.sizes)
        x = torch.randint(79, (total, *self.shape)) if self.tokens else torch.randn(total, *self.shape)
        y = torch.randn(total, 1) if self.classes is None else torch.randint(self.classes, (total,))
        ids = [str(i) for i in range(len(self.sizes))]
        return Partition(TensorDataset(x, y), ids, np.arange(total), np.array(self.sizes))

    def model(self) -> Trained:
        """The module, with the same weights every time."""
        torch.manual_seed(0)
        loss = nn.functional.mse_loss if self.classes is None else nn.functional.cross_entropy
        return Trained(self.network(), loss, self.adam)


def between(low: int, high: int, count: int) -> list[int]:
    """Sizes of clients, drawn at random."""
    return np.random.default_rng(0).integers(low, high + 1, count).tolist()


def _small() -> nn.Module:
    return mlp(60, 50, 10)


# The task that `epochs` times alone.
EPOCHS = "MLP 60-50-10, 20 clients of 100 to 400, 2 epochs of 20"
COMBINATIONS = {
    EPOCHS: Combination(_small, (60,), between(100, 400, 20), 20, {"local_epochs": 2}),
    "MLP 60-50-10, 20 clients of 100, 20 steps of 20": Combination(_small, (60,), [100] * 20, 20, {"local_steps": 20}),
    "MLP 60-50-10, Adam, 12 clients of 5 to 19, 10 steps of all": Combination(
        _small, (60,), between(5, 19, 12), 20, {"local_steps": 10}, adam=True
    ),
    "MLP 60-50-10, one client of 1500 and 19 of 30 to 60, 1 epoch of 20": Combination(
        _small, (60,), [1500, *between(30, 60, 19)], 20, {"local_epochs": 1}
    ),
    "linear 1000, 20 clients of 30, 20 steps of all": Combination(
        lambda: nn.Linear(1000, 1, bias=False), (1000,), [30] * 20, 30, {"local_steps": 20}, classes=None
    ),
    "MLP 784-200-62, 20 clients of 60 to 200, 20 steps of 50": Combination(
        lambda: mlp(784, 200, 62), (784,), between(60, 200, 20), 50, {"local_steps": 20}
    ),
    "MLP 784-200-62, 20 clients of 60 to 200, 2 epochs of 20": Combination(
        lambda: mlp(784, 200, 62), (784,), between(60, 200, 20), 20, {"local_epochs": 2}
    ),
    "CNN 4-8, 12 clients of 30 to 90, 2 epochs of 16": Combination(
        lambda: cnn(4, 8, 12, 16), (1, 12, 12), between(30, 90, 12), 16, {"local_epochs": 2}
    ),
    "CNN 32-64, 6 clients of 40, 4 steps of 20": Combination(
        lambda: cnn(32, 64, 28, 128), (1, 28, 28), [40] * 6, 20, {"local_steps": 4}
    ),
    "transformer 32, 10 clients of 20 to 60, 2 epochs of 8": Combination(
        lambda: TokenClassifier(32, 2), (16,), between(20, 60, 10), 8, {"local_epochs": 2}, 79, tokens=True
    ),
}


class Measured(NamedTuple):
    """Seconds of a round on each engine; what is predicted of them; and what there is to do."""

    seconds: dict[str, float]
    chosen: str
    speedup: float
    counts: tuple[OneByOne, Together]


class _Clock(FederatedCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_round_start(self) -> None:
        self.times.append(time.perf_counter())

    def on_fit_end(self) -> None:
        self.times.append(time.perf_counter())


def rounds_of(combination: Combination, engine: str, rounds: int) -> tuple[list[float], FederatedLoop]:
    """Seconds of each round after the first, and the loop."""
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {"enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
        loop = FederatedLoop(
            server=FedAvg(), max_rounds=rounds + 1, engine=engine, callbacks=[clock], out_dir=folder,
            **combination.work, **arguments,
        )  # fmt: skip
        loop.fit(combination.model(), FederatedDataModule(combination.clients(), batch_size=combination.batch_size))
    return np.diff(clock.times)[1:].tolist(), loop


def measure(combination: Combination, repetitions: int, rounds: int) -> Measured:
    """Time both engines in turn; the fastest round of each counts, which a busy machine disturbs least."""
    seen: list[tuple[float, tuple[OneByOne, Together]]] = []

    def noted(cost: Any, stacks: Any, *arguments: Any) -> float:
        speedup = predicted_speedup(cost, stacks, *arguments)
        seen.append((speedup, counted(cost, stacks)))
        return speedup

    with mock.patch.object(trial, "predicted_speedup", noted):
        chosen = rounds_of(combination, "auto", 0)[1].backend.engine_name
    assert chosen is not None
    seconds = {engine: float("inf") for engine in ENGINES}
    for _ in range(repetitions):
        for engine in ENGINES:
            seconds[engine] = min(seconds[engine], *rounds_of(combination, engine, rounds)[0])
    return Measured(seconds, chosen, *seen[0])


def choice_table(measured: dict[str, Measured]) -> str:
    """Milliseconds of a round, what `engine="auto"` takes, and how that compares with the better engine."""
    rows = []
    for name, (seconds, chosen, speedup, _) in measured.items():
        best = min(seconds.values())
        rows.append([
            name, *[f"{1000 * seconds[engine]:.1f}" for engine in ENGINES], f"{speedup:.2f}",
            f"{seconds['sequential'] / seconds['vectorized']:.2f}", chosen, f"{seconds[chosen] / best:.2f}",
            f"{seconds[chosen] / seconds['sequential']:.2f}",
        ])  # fmt: skip
    header = [
        "task", "sequential (ms)", "vectorized (ms)", "predicted speed-up", "measured", "auto",
        "auto / better", "auto / sequential",
    ]  # fmt: skip
    return markdown(header, rows)


def measure_all(repetitions: int, rounds: int, names: Sequence[str] = ()) -> dict[str, Measured]:
    """Measure all combinations, or some."""
    return {name: measure(COMBINATIONS[name], repetitions, rounds) for name in names or COMBINATIONS}
