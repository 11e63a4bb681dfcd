"""The constants of the choice of an engine: how well they predict, and what a fit to this machine makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np

from lightning_feddua.engines.prediction import OneByOne, Together
from tests.benchmarks.choice import COMBINATIONS, Combination, Measured, choice_table, measure
from tests.benchmarks.modules import TokenClassifier, cnn, mlp

_STEPS = {"local_steps": 4}


def _mlp(*widths: int, samples: int, clients: int = 20, adam: bool = False) -> Combination:
    return Combination(lambda: mlp(*widths), widths[:1], [samples] * clients, samples, _STEPS, adam=adam)


# Besides the combinations that a choice is judged by, others of equal clients, to tell constants apart.
OTHERS = {
    "MLP 60-50-10, Adam": _mlp(60, 50, 10, samples=20, adam=True),
    "MLP 784-200-62": _mlp(784, 200, 62, samples=50),
    "MLP 784-200-62, batch of 10": _mlp(784, 200, 62, samples=10),
    "MLP of 7 layers of 64": _mlp(*[64] * 8, samples=32),
    "MLP of 3 layers of 1024": _mlp(1024, 1024, 1024, 10, samples=64, clients=10),
    "CNN 4-8": Combination(lambda: cnn(4, 8, 12, 16), (1, 12, 12), [16] * 20, 16, _STEPS),
    "CNN 16-32": Combination(lambda: cnn(16, 32, 28, 64), (1, 28, 28), [10] * 10, 10, _STEPS),
    "transformer 32": Combination(lambda: TokenClassifier(32, 2), (16,), [8] * 10, 8, _STEPS, 79, tokens=True),
    "transformer 128": Combination(lambda: TokenClassifier(128, 2), (32,), [16] * 8, 16, _STEPS, 79, tokens=True),
}


def prediction_table(repetitions: int, rounds: int) -> str:
    """Predicted and measured speed of stacks over one by one, and constants that fit the measured times."""
    measured = {name: measure(case, repetitions, rounds) for name, case in (COMBINATIONS | OTHERS).items()}
    return f"{choice_table(measured)}\n\nFitted to these, on this machine:\n\n{fitted(list(measured.values()))}"


def fitted(measured: Sequence[Measured]) -> str:
    """The constants that predict the measured times best, as they are written in the table."""
    lines = []
    for place, (kind, engine) in enumerate(((OneByOne, "sequential"), (Together, "vectorized"))):
        counts = np.array([astuple(one.counts[place]) for one in measured])
        seconds = np.array([one.seconds[engine] for one in measured])
        found = non_negative_fit(counts, seconds)
        errors = np.abs(counts @ found / seconds - 1)
        names = ", ".join(
            f"{name}={value:.3g}" for name, value in zip(kind.__dataclass_fields__, found, strict=True)
        )  # fmt: skip
        lines.append(
            f"{kind.__name__}({names})  # relative error: mean {errors.mean():.2f}, largest {errors.max():.2f}"
        )
    return "\n".join(lines)


def non_negative_fit(counts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Non-negative constants whose relative errors have the least squares.

    Args:
        counts: what there is to do, a row for each case.
        seconds: how long each took.
    """
    rows = counts / seconds[:, None]
    scale = np.maximum(np.linalg.norm(rows, axis=0), 1e-30)
    rows, found = rows / scale, np.zeros(counts.shape[1])
    # One constant at a time, which converges for a convex problem.
    gram, target = rows.T @ rows, rows.sum(axis=0)
    for _ in range(20_000):
        before = found.copy()
        for j in range(len(found)):
            found[j] = max(0.0, found[j] + (target[j] - gram[j] @ found) / gram[j, j]) if gram[j, j] else 0.0
        if np.abs(found - before).max() <= 1e-12 * np.abs(found).max():
            break
    return found / scale
