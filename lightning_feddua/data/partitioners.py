"""Ways to split one dataset into clients: every row is dealt, each exactly once."""

from __future__ import annotations

import numpy as np

from lightning_feddua.errors import ConfigurationError


class Partitioner:
    """Splits rows into clients.

    Args:
        num_clients: the number of clients.
        seed: of the split.
    """

    def __init__(self, num_clients: int, seed: int = 0) -> None:
        _check_at_least("num_clients", num_clients, 1)
        self.num_clients = num_clients
        self.seed = seed

    def partition(self, labels: np.ndarray) -> list[np.ndarray]:
        """The rows of each client.

        Args:
            labels: the label of each row.
        """
        labels = np.asarray(labels)
        if len(labels) < self.num_clients:
            raise ConfigurationError(
                f"{self.num_clients} clients cannot share {len(labels)} rows.", "Use fewer clients, or more data."
            )
        return self._split(labels, np.random.default_rng(self.seed))

    def _split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        raise NotImplementedError


class IIDPartitioner(Partitioner):
    """Rows at random, sizes equal but for one.

    >>> [len(rows) for rows in IIDPartitioner(3).partition(np.zeros(10))]
    [4, 3, 3]
    """

    def _split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        return np.array_split(rng.permutation(len(labels)), self.num_clients)


class DirichletPartitioner(Partitioner):
    """Each class is split over clients in proportions drawn from a Dirichlet distribution; sizes differ (Hsu et al.).

    Args:
        num_clients: the number of clients.
        alpha: the concentration: small for skewed clients.
        min_samples: draw again until each client has this many rows.
        seed: of the split.
    """

    _TRIES = 100

    def __init__(self, num_clients: int, alpha: float = 0.3, min_samples: int = 1, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        _check_positive("alpha", alpha)
        self.alpha = alpha
        self.min_samples = min_samples

    def _split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
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

    Every client draws its rows' classes from its own proportions; where a class runs out, clients that still have room
    draw again among the classes that are left.

    Args:
        num_clients: the number of clients.
        alpha: the concentration: small for skewed clients.
        seed: of the split.
    """

    def __init__(self, num_clients: int, alpha: float = 0.3, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        _check_positive("alpha", alpha)
        self.alpha = alpha

    def _split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
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
    """Rows sorted by label, cut into equal shards, a few random shards for each client (McMahan et al.).

    Args:
        num_clients: the number of clients.
        shards_per_client: the number of shards of each.
        seed: of the split.
    """

    def __init__(self, num_clients: int, shards_per_client: int = 2, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        _check_at_least("shards_per_client", shards_per_client, 1)
        self.shards_per_client = shards_per_client

    def _split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        count = self.num_clients * self.shards_per_client
        if len(labels) < count:
            raise ConfigurationError(f"{count} shards cannot share {len(labels)} rows.", "Use fewer shards or clients.")
        shards = np.array_split(_rows_by_class(labels, rng)[0], count)
        order = rng.permutation(count).reshape(self.num_clients, self.shards_per_client)
        return [np.concatenate([shards[i] for i in mine]) for mine in order]


class PathologicalPartitioner(Partitioner):
    """Each client has exactly k classes; the rows of a class are shared equally by the clients that have it.

    Args:
        num_clients: the number of clients.
        classes_per_client: the number k of classes of each.
        seed: of the split.
    """

    def __init__(self, num_clients: int, classes_per_client: int = 2, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        _check_at_least("classes_per_client", classes_per_client, 1)
        self.classes_per_client = classes_per_client

    def _split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
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
                    "Use fewer clients, or fewer classes for each.",
                )
            quota[owners, label] = [len(part) for part in np.array_split(np.empty(counts[label]), len(owners))]
        return _deal(rows, counts, quota)


class QuantitySkewPartitioner(Partitioner):
    """Rows at random, sizes in proportions drawn from a Dirichlet distribution.

    Args:
        num_clients: the number of clients.
        alpha: the concentration: small for very different sizes.
        min_samples: the least number of rows of a client.
        seed: of the split.
    """

    def __init__(self, num_clients: int, alpha: float = 1.0, min_samples: int = 1, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        _check_positive("alpha", alpha)
        self.alpha = alpha
        self.min_samples = min_samples

    def _split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        spare = _check_sizes_possible(len(labels), self.num_clients, self.min_samples)
        shares = rng.dirichlet(np.full(self.num_clients, self.alpha))
        cuts = np.rint(np.cumsum(shares) * spare).astype(np.int64) + self.min_samples * np.arange(
            1, self.num_clients + 1
        )
        return np.split(rng.permutation(len(labels)), cuts[:-1])


class NaturalPartitioner(Partitioner):
    """A client for each distinct value, given as the labels: a writer, a speaker, a device."""

    def __init__(self) -> None:
        super().__init__(1)

    def _split(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        return np.split(np.argsort(codes, kind="stable"), np.cumsum(counts)[:-1])


def _rows_by_class(labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows in the order of their class, shuffled within it, and the size of each class."""
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(codes[shuffled], kind="stable")], counts


def _deal(rows: np.ndarray, counts: np.ndarray, quota: np.ndarray) -> list[np.ndarray]:
    """Give each client ``quota[client, label]`` rows of each class, from rows in the order of their class."""
    clients, classes = quota.shape
    owner = np.repeat(np.tile(np.arange(clients), classes), quota.T.ravel())
    order = np.argsort(owner, kind="stable")
    return np.split(rows[order], np.cumsum(quota.sum(axis=1))[:-1])


def _draw_classes(rng: np.random.Generator, shares: np.ndarray, room: np.ndarray, left: np.ndarray) -> np.ndarray:
    """How many rows of each class the clients with room want, drawn among the classes that are left."""
    odds = np.where(left > 0, shares, 0.0)
    # A client whose own classes have all run out takes what there is.
    odds[odds.sum(axis=1) < 1e-12] = left
    return rng.multinomial(room, odds / odds.sum(axis=1, keepdims=True))


def _check_sizes_possible(rows: int, clients: int, min_samples: int) -> int:
    spare = rows - clients * min_samples
    if spare < 0:
        raise ConfigurationError(
            f"{clients} clients of at least {min_samples} rows each need more than the {rows} rows there are.",
            "Use fewer clients or a smaller `min_samples`.",
        )
    return spare


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"`{name}={value}` is not positive.", "Give a positive number.")


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigurationError(f"`{name}={value}` is less than {least}.", f"Give a whole number from {least} up.")
