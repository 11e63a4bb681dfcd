"""The work of a benchmark as arrays: the same for every framework. Needs nothing but NumPy."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Work:
    """Some rounds of local training, down to the last minibatch.

    Args:
        task: the name of the task, which says what the model is.
        weights: the initial weights, flat and in torch's order.
        inputs: the inputs of all samples.
        targets: their targets.
        rows: the samples of each minibatch, by round, place in the cohort, step and place in the minibatch.
        lr: the learning rate of plain SGD.
        weight_decay: its coupled weight decay.
    """

    task: str
    weights: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    rows: np.ndarray
    lr: float
    weight_decay: float

    @property
    def rounds(self) -> int:
        return self.rows.shape[0]

    @property
    def cohort_size(self) -> int:
        return self.rows.shape[1]

    @property
    def steps(self) -> int:
        return self.rows.shape[2]

    @property
    def batch_size(self) -> int:
        return self.rows.shape[3]

    def client_rows(self, round: int, position: int) -> np.ndarray:
        """The samples of a client's minibatches, one after another: a pass over them in order is its local work."""
        return self.rows[round, position].reshape(-1)

    def save(self, path: Path) -> None:
        np.savez(path, **asdict(self))

    @classmethod
    def load(cls, path: Path) -> Work:
        with np.load(path) as arrays:
            return cls(**{name: array if array.ndim else array.item() for name, array in arrays.items()})


@dataclass(frozen=True)
class Timing:
    """What came of it.

    Args:
        seconds: the time of each round.
        update: the mean update of the first round, flat and in torch's order.
    """

    seconds: list[float]
    update: np.ndarray

    def report(self, path: Path) -> None:
        """Tell the process that asked: seconds on the last line of the output, the update in a file."""
        np.save(path, self.update)
        print("\n" + json.dumps({"seconds": self.seconds}), flush=True)

    @classmethod
    def received(cls, output: str, path: Path) -> Timing:
        """The same at the other end."""
        return cls(json.loads(output.strip().splitlines()[-1])["seconds"], np.load(path))


def runner_arguments(**more: Any) -> argparse.Namespace:
    """What a runner is told: files, threads, processes.

    Args:
        **more: further positional arguments, and what they may be.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path, help="the work, as saved by the process that asks for it")
    parser.add_argument("update", type=Path, help="where to save the mean update of the first round")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the cohort")
    for name, choices in more.items():
        parser.add_argument(name, choices=choices)
    return parser.parse_args()
