"""Ways to split one dataset into clients. Those defined here give each row to exactly one client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from lightning_feddua.checks import check_positive, check_whole
from lightning_feddua.data.partition import check_whole_rows, rows_by_value
from lightning_feddua.errors import ConfigurationError


class Partitioner(ABC):
    """Splits the rows of a dataset into clients. A subclass defines :meth:`split`.

    Args:
        num_clients: the number of clients. The dataset must have at least as many rows.
        seed: the seed of the split.
    """

    # Whether the split depends on the labels; if not, `split` gets zeros where there are none.
    needs_labels: ClassVar[bool] = True

    def __init__(self, num_clients: int, seed: int = 0) -> None:
        check_whole("num_clients", num_clients, least=1)
        self.num_clients = num_clients
        self.seed = seed

    def partition(self, labels: np.ndarray) -> list[np.ndarray] | dict[str, np.ndarray]:
        """The rows of each client: a dict by name if :meth:`split` names the clients, else a list.

        Args:
            labels: the label of each row.
        """
        labels = np.asarray(labels)
        if len(labels) < self.num_clients:
            raise ConfigurationError(
                f"{self.num_clients} clients cannot share {len(labels)} rows.", "Use fewer clients, or more data."
            )
        parts = self.split(labels, np.random.default_rng(self.seed))
        self._check(parts)
        return dict(parts) if isinstance(parts, Mapping) else list(parts)

    @abstractmethod
    def split(self, labels: np.ndarray, rng: np.random.Generator) -> Sequence[np.ndarray] | Mapping[str, np.ndarray]:
        """Choose the rows of each client.

        Args:
            labels: the label of each row.
            rng: the source of all randomness, seeded with ``seed``.

        Returns:
            An array of row indices for each client: a list, or a mapping by client name. Each row belongs to at most
            one client.
        """

    def _check(self, parts: Any) -> None:
        method = f"`{type(self).__name__}.split`"
        if isinstance(parts, str) or not isinstance(parts, Mapping | Sequence | np.ndarray):
            raise ConfigurationError(
                f"{method} returned a `{type(parts).__name__}`.",
                "Return a list of index arrays, or a mapping from client names to index arrays.",
            )
        for client, rows in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
            if not isinstance(rows, np.ndarray) or rows.ndim != 1:
                shape = f" of shape {rows.shape}" if isinstance(rows, np.ndarray) else ""
                raise ConfigurationError(
                    f"{method} returned a `{type(rows).__name__}`{shape} for client `{client}`.",
                    "Return a one-dimensional NumPy array of row indices for each client.",
                )
            check_whole_rows(str(client), rows)


class IIDPartitioner(Partitioner):
    """Random rows, in clients of equal size up to one row.

    >>> [len(rows) for rows in IIDPartitioner(3).partition(np.zeros(10))]
    [4, 3, 3]
    """

    needs_labels = False

    def split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Cut the shuffled rows into parts of equal size."""
        return np.array_split(rng.permutation(len(labels)), self.num_clients)


class DirichletPartitioner(Partitioner):
    """Splits each class in proportions drawn from a Dirichlet distribution, so that sizes differ (Hsu et al.).

    Args:
        num_clients: the number of clients.
        alpha: the concentration; the smaller it is, the more skewed the clients are.
        min_samples: the minimum number of rows per client; proportions are redrawn until all clients have it.
        seed: the seed of the split.
    """

    _TRIES = 100

    def __init__(self, num_clients: int, alpha: float = 0.3, min_samples: int = 1, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        check_positive("alpha", alpha, finite=True)
        self.alpha = alpha
        self.min_samples = min_samples

    def split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Draw proportions until every client has enough rows."""
        rows, counts = _rows_by_class(labels, rng)
        _check_sizes_possible(len(labels), self.num_clients, self.min_samples)
        for _ in range(self._TRIES):
            shares = rng.dirichlet(np.full(self.num_clients, self.alpha), size=len(counts))
            cuts = np.rint(np.cumsum(shares, axis=1) * counts[:, None]).astype(np.int64)
            cuts[:, -1] = counts
            quota = np.diff(cuts, axis=1, prepend=0).T
            if quota.sum(axis=1).min() >= self.min_samples:
                return _deal(rows, counts, quota)
        raise ConfigurationError(
            f"No draw in {self._TRIES} gave each of {self.num_clients} clients {self.min_samples} rows"
            f" at alpha={self.alpha}.",
            "Use fewer clients, a larger `alpha` or a smaller `min_samples`.",
        )


class EqualDirichletPartitioner(Partitioner):
    """Clients of equal size with class proportions from a Dirichlet distribution, as in FedExP's experiments.

    Every client draws the classes of its rows from its own proportions. When a class runs out, clients that are not
    full redraw among the remaining classes.

    Args:
        num_clients: the number of clients.
        alpha: the concentration; the smaller it is, the more skewed the clients are.
        seed: the seed of the split.
    """

    def __init__(self, num_clients: int, alpha: float = 0.3, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        check_positive("alpha", alpha, finite=True)
        self.alpha = alpha

    def split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Fill all clients to the same size, class by class."""
        rows, counts = _rows_by_class(labels, rng)
        room = np.full(self.num_clients, len(labels) // self.num_clients)
        room[: len(labels) % self.num_clients] += 1
        left = counts.copy()
        shares = rng.dirichlet(np.full(len(counts), self.alpha), size=self.num_clients)
        quota = np.zeros((self.num_clients, len(counts)), dtype=np.int64)
        while room.any():
            wanted = _draw_classes(rng, shares, room, left)
            for label in np.flatnonzero(wanted.sum(axis=0) > left):
                wanted[:, label] = rng.multivariate_hypergeometric(wanted[:, label], left[label])
            quota += wanted
            room -= wanted.sum(axis=1)
            left -= wanted.sum(axis=0)
        return _deal(rows, counts, quota)


class ShardPartitioner(Partitioner):
    """Sorts the rows by label, cuts them into equal shards and gives each client a few at random (McMahan et al.).

    Args:
        num_clients: the number of clients.
        shards_per_client: the number of shards per client.
        seed: the seed of the split.
    """

    def __init__(self, num_clients: int, shards_per_client: int = 2, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        check_whole("shards_per_client", shards_per_client, least=1)
        self.shards_per_client = shards_per_client

    def split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Deal shuffled shards."""
        count = self.num_clients * self.shards_per_client
        if len(labels) < count:
            raise ConfigurationError(f"{count} shards cannot share {len(labels)} rows.", "Use fewer shards or clients.")
        shards = np.array_split(_rows_by_class(labels, rng)[0], count)
        order = rng.permutation(count).reshape(self.num_clients, self.shards_per_client)
        return [np.concatenate([shards[i] for i in mine]) for mine in order]


class PathologicalPartitioner(Partitioner):
    """Gives each client exactly k classes. The clients that have a class share its rows equally.

    Args:
        num_clients: the number of clients.
        classes_per_client: the number k of classes per client.
        seed: the seed of the split.
    """

    def __init__(self, num_clients: int, classes_per_client: int = 2, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        check_whole("classes_per_client", classes_per_client, least=1)
        self.classes_per_client = classes_per_client

    def split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Deal each class to its owners in equal parts."""
        rows, counts = _rows_by_class(labels, rng)
        k, classes = self.classes_per_client, len(counts)
        if not k <= classes <= self.num_clients * k:
            raise ConfigurationError(
                f"{self.num_clients} clients of {k} classes each cannot cover the {classes} classes of the data.",
                "Change `num_clients` or `classes_per_client`.",
            )
        owned = rng.permutation(classes)[np.arange(self.num_clients * k) % classes].reshape(self.num_clients, k)
        owned = owned[rng.permutation(self.num_clients)]
        quota = np.zeros((self.num_clients, classes), dtype=np.int64)
        for label in range(classes):
            owners = np.flatnonzero((owned == label).any(axis=1))
            if counts[label] < len(owners):
                raise ConfigurationError(
                    f"The {counts[label]} rows of class {label} cannot be shared by {len(owners)} clients.",
                    "Use fewer clients, or fewer classes per client.",
                )
            quota[owners, label] = [len(part) for part in np.array_split(np.empty(counts[label]), len(owners))]
        return _deal(rows, counts, quota)


class QuantitySkewPartitioner(Partitioner):
    """Random rows, in clients whose sizes are drawn from a Dirichlet distribution.

    Args:
        num_clients: the number of clients.
        alpha: the concentration; the smaller it is, the more the sizes differ.
        min_samples: the minimum number of rows per client.
        seed: the seed of the split.
    """

    needs_labels = False

    def __init__(self, num_clients: int, alpha: float = 1.0, min_samples: int = 1, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        check_positive("alpha", alpha, finite=True)
        self.alpha = alpha
        self.min_samples = min_samples

    def split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Cut the shuffled rows at random places."""
        spare = _check_sizes_possible(len(labels), self.num_clients, self.min_samples)
        shares = rng.dirichlet(np.full(self.num_clients, self.alpha))
        least = self.min_samples * np.arange(1, self.num_clients + 1)
        cuts = np.rint(np.cumsum(shares) * spare).astype(np.int64) + least
        return np.split(rng.permutation(len(labels)), cuts[:-1])


class NaturalPartitioner(Partitioner):
    """One client for each distinct label, such as a writer, a speaker or a device, and named after it.

    Clients are in order of first appearance.

    >>> NaturalPartitioner().partition(np.array(["bob", "alice", "bob"]))
    {'bob': array([0, 2]), 'alice': array([1])}
    """

    def __init__(self) -> None:
        super().__init__(num_clients=1)

    def split(self, labels: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Group the rows by label."""
        names, rows, sizes = rows_by_value(labels)
        return dict(zip(names.tolist(), np.split(rows, np.cumsum(sizes)[:-1]), strict=True))


def _rows_by_class(labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows sorted by class and shuffled within each class, and the size of each class."""
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(codes[shuffled], kind="stable")], counts


def _deal(rows: np.ndarray, counts: np.ndarray, quota: np.ndarray) -> list[np.ndarray]:
    """Give each client ``quota[client, label]`` rows of each class, from rows sorted by class."""
    clients, classes = quota.shape
    owner = np.repeat(np.tile(np.arange(clients), classes), quota.T.ravel())
    order = np.argsort(owner, kind="stable")
    return np.split(rows[order], np.cumsum(quota.sum(axis=1))[:-1])


def _draw_classes(rng: np.random.Generator, shares: np.ndarray, room: np.ndarray, left: np.ndarray) -> np.ndarray:
    """How many rows of each class each client asks for, drawn among the remaining classes."""
    odds = np.where(left > 0, shares, 0.0)
    # A client whose classes have all run out takes whatever remains.
    odds[odds.sum(axis=1) < 1e-12] = left
    return rng.multinomial(room, odds / odds.sum(axis=1, keepdims=True))


def _check_sizes_possible(rows: int, clients: int, min_samples: int) -> int:
    spare = rows - clients * min_samples
    if spare < 0:
        raise ConfigurationError(
            f"{clients} clients of at least {min_samples} rows each need more than the {rows} rows of the dataset.",
            "Use fewer clients or a smaller `min_samples`.",
        )
    return spare
