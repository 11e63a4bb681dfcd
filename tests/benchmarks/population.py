"""A loop over a large population of clients that are made when they are asked for, in a process of its own.

Prints JSON: how long start-up and the sampling of a cohort take, how much memory the process needed, and how many
datasets were made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_feddua import FedAvg, FederatedCallback, FederatedDataModule, FederatedLoop
from lightning_feddua.data.partition import Partition
from lightning_feddua.models import LinearRegression
from lightning_feddua.sampling import sample_cohort

KINDS = ("partition", "mapping", "mapping with ids")
_DIM, _SAMPLES, _COHORT = 10, 5, 1000


class LazyClients(Mapping[str, TensorDataset]):
    """Clients that exist while they train.

    Args:
        population: how many.
    """

    def __init__(self, population: int) -> None:
        self.population = population
        self.made = 0

    def __getitem__(self, name: str) -> TensorDataset:
        self.made += 1
        generator = torch.Generator().manual_seed(int(name))
        return TensorDataset(
            torch.randn(_SAMPLES, _DIM, generator=generator), torch.randn(_SAMPLES, 1, generator=generator)
        )

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self.population))

    def __len__(self) -> int:
        return self.population


class LazyClientsWithIds(LazyClients):
    """The same, with names that need not be listed."""

    @property
    def ids(self) -> Sequence[int]:
        return range(self.population)


def make_clients(kind: str, population: int) -> Mapping:
    """A population of a kind."""
    if kind == "partition":
        dataset = TensorDataset(torch.randn(100, _DIM), torch.randn(100, 1))
        return Partition(dataset, range(population), np.arange(population) % 100, np.ones(population, dtype=np.int64))
    return (LazyClientsWithIds if kind == "mapping with ids" else LazyClients)(population)


class _FirstRound(FederatedCallback):
    def on_round_start(self) -> None:
        self.time = time.perf_counter()


def run(kind: str, population: int) -> dict[str, float]:
    """One round with a cohort of up to 1,000."""
    clients = make_clients(kind, population)
    cohort = min(_COHORT, population)
    first = _FirstRound()
    sampling = []
    for round in range(20):
        begin = time.perf_counter()
        sample_cohort(0, round, population, cohort)
        sampling.append(time.perf_counter() - begin)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        loop = FederatedLoop(
            server=FedAvg(),
            max_rounds=1,
            clients_per_round=cohort,
            local_steps=1,
            engine="sequential",
            out_dir=folder,
            accelerator="cpu",
            callbacks=[first],
            enable_progress_bar=False,
            enable_checkpointing=False,
        )
        loop.fit(LinearRegression(_DIM), FederatedDataModule(clients))
    return {
        "sampling": statistics.median(sampling),
        "start": first.time - begin,
        "memory": peak_memory(),
        "made": getattr(clients, "made", 0),
    }


def peak_memory() -> float:
    """The largest resident memory of this process so far, in MB. Linux; NaN elsewhere."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return float("nan")
    # Not `ru_maxrss`, which a process inherits from the one that started it.
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("population", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(run(arguments.kind, arguments.population)))
