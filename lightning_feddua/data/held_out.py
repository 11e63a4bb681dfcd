"""A part of each client's samples, held out for validation."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_feddua.data.partition import Partition
from lightning_feddua.data.streams import is_stream
from lightning_feddua.errors import ConfigurationError

Clients = Mapping[str, Dataset[Any]]


def hold_out(clients: Clients, fraction: float, seed: int = 0) -> tuple[Clients, Clients]:
    """Split each client's samples at random into those for training and those for validation.

    A client's split depends on its name, its size and the seed alone. Both parts have at least one sample.

    Args:
        clients: a map-style dataset for each client.
        fraction: the part of a client's samples that is held out.
        seed: the seed of the splits.

    Returns:
        The clients with the samples that remain, and the same clients with those that are held out.
    """
    if isinstance(fraction, bool) or not 0 < fraction < 1:
        raise ConfigurationError(
            f"`val_clients={fraction}` is not a fraction of a client's samples.", "Give a number between 0 and 1."
        )
    if isinstance(clients, Partition):
        parts = [_split(str(name), rows, fraction, seed) for name, rows in clients.items_by_rows()]
        return tuple(_partition(clients, [part[i] for part in parts]) for i in range(2))  # type: ignore[return-value]
    if isinstance(clients, dict):
        for name, dataset in clients.items():
            _rows_of(name, dataset, fraction, seed, held_out=False)
    return _Parts(clients, fraction, seed, held_out=False), _Parts(clients, fraction, seed, held_out=True)


def pooled(clients: Clients) -> Dataset[Any] | None:
    """All clients' samples as one dataset; None where finding them would make every client's dataset."""
    if isinstance(clients, Partition):
        return Subset(clients.dataset, clients.all_rows)  # type: ignore[arg-type]
    known = isinstance(clients, _Parts) and isinstance(clients.clients, dict) and len(clients) > 0
    return ConcatDataset(list(clients.values())) if known else None


class _Parts(Mapping[str, Dataset[Any]]):
    """One part of each client's samples, made on access."""

    def __init__(self, clients: Clients, fraction: float, seed: int, held_out: bool) -> None:
        self.clients = clients
        self._how: tuple[float, int, bool] = (fraction, seed, held_out)

    def __getattr__(self, name: str) -> Any:
        # There only where the mapping that is split has them.
        if name == "ids":
            return self.clients.ids  # type: ignore[attr-defined]
        if name == "sizes":
            fraction, _, held_out = self._how
            sizes = (
                [len(dataset) for dataset in self.clients.values()]
                if isinstance(self.clients, dict)
                else self.clients.sizes  # type: ignore[attr-defined]
            )
            counts = [_held_out_count(int(size), fraction) for size in sizes]
            return np.array(counts if held_out else np.asarray(sizes) - counts, dtype=np.int64)
        raise AttributeError(name)

    def __getitem__(self, name: str) -> Dataset[Any]:
        dataset = self.clients[name]
        return Subset(dataset, _rows_of(name, dataset, *self._how))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[str]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)


def _rows_of(name: str, dataset: Dataset[Any], fraction: float, seed: int, held_out: bool) -> np.ndarray:
    if is_stream(dataset):
        raise ConfigurationError(
            f"Client `{name}` is a `{type(dataset).__name__}`, of which no part can be held out.",
            "Give `val_clients` a dataset for each client, or leave it out.",
        )
    return _split(name, np.arange(len(dataset)), fraction, seed)[held_out]  # type: ignore[arg-type]


def _split(name: str, rows: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and held-out rows, each in their order."""
    if len(rows) < 2:
        raise ConfigurationError(
            f"Client `{name}` has {len(rows)} samples, of which none can be held out.", "Leave such clients out."
        )
    drawn = np.random.default_rng([seed, zlib.crc32(str(name).encode()), len(rows)]).permutation(len(rows))
    count = _held_out_count(len(rows), fraction)
    return rows[np.sort(drawn[count:])], rows[np.sort(drawn[:count])]


def _held_out_count(size: int, fraction: float) -> int:
    return min(max(round(fraction * size), 1), size - 1)


def _partition(clients: Partition, rows: Sequence[np.ndarray]) -> Partition:
    part = Partition(clients.dataset, clients.ids, np.concatenate(rows), np.array([len(r) for r in rows]))
    part.labels = clients.labels
    return part
