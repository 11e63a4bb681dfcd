"""Who takes part in a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from lightning_feddua.errors import ConfigurationError
from lightning_feddua.randomness import Purpose, generator


class ClientSampler(ABC):
    """Draws the cohort of each round.

    A cohort is a function of seed, round and population alone, so that every rank draws the same and a resumed run
    repeats it. Attributes that do not begin with an underscore must stay the same when a run is resumed.

    Example:
        Clients that take turns, for a population that is awake in shifts:

        >>> class Shifts(ClientSampler):
        ...     def sample(self, seed, round, population):
        ...         return range(round % 3, population, 3)
    """

    @abstractmethod
    def sample(self, seed: int, round: int, population: int) -> Sequence[int]:
        """The clients of a round, as places in the data module, each at most once.

        Args:
            seed: the run's seed; :func:`~lightning_feddua.randomness.generator` makes a generator of it.
            round: the round, from 0.
            population: how many clients there are.
        """

    def size(self, population: int) -> int | None:
        """How many clients every cohort has; None where that varies."""
        return None

    def describe(self, population: int) -> str:
        """What the header says of a cohort."""
        size = self.size(population)
        return f"{type(self).__name__} of {population}" if size is None else f"{size} of {population}"


class UniformSampler(ClientSampler):
    """Clients drawn uniformly without replacement; what ``clients_per_round`` stands for.

    Args:
        clients_per_round: how many; a fraction of all if a float; all if None.
    """

    def __init__(self, clients_per_round: int | float | None = None) -> None:
        self.clients_per_round = clients_per_round

    def sample(self, seed: int, round: int, population: int) -> Sequence[int]:
        """In ascending order."""
        return sample_cohort(seed, round, population, self.size(population))

    def size(self, population: int) -> int:
        """The same in each round."""
        if self.clients_per_round is None:
            return population
        if isinstance(self.clients_per_round, float):
            return max(1, round(self.clients_per_round * population))
        if self.clients_per_round > population:
            raise ConfigurationError(
                f"`clients_per_round={self.clients_per_round}` is more than the {population} clients there are.",
                "Choose fewer, or None for all.",
            )
        return self.clients_per_round


def sample_cohort(seed: int, round: int, population: int, size: int) -> list[int]:
    """Clients of a round: uniform without replacement, in ascending order.

    >>> sample_cohort(seed=0, round=3, population=10, size=10)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if size == population:
        return list(range(population))
    drawn = generator(seed, round, 0, Purpose.COHORT).choice(population, size, replace=False, shuffle=False)
    return np.sort(drawn).tolist()


def check_cohort(sampler: ClientSampler, cohort: Sequence[int], population: int) -> list[int]:
    """What a sampler has drawn, as a list; one clear error for what cannot be a cohort."""
    if isinstance(sampler, UniformSampler):
        return list(cohort)
    places = np.asarray(cohort)
    name = f"`{type(sampler).__name__}.sample`"
    if places.size == 0:
        return []
    if places.ndim != 1 or places.dtype.kind not in "iu":
        raise ConfigurationError(
            f"{name} returned a `{type(cohort).__name__}` that is not a list of whole numbers.",
            "Return the clients' places in the data module.",
        )
    outside = places[(places < 0) | (places >= population)]
    if outside.size:
        raise ConfigurationError(
            f"{name} returned client {outside[0]}, and there are {population} clients.",
            "Return places from 0 up to the number of clients.",
        )
    if len(np.unique(places)) < len(places):
        raise ConfigurationError(f"{name} returned a client twice.", "Return each client at most once.")
    return places.tolist()
