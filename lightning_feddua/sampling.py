"""Who takes part in a round."""

import numpy as np

from lightning_feddua.randomness import Purpose, generator


def sample_cohort(seed: int, round: int, population: int, size: int) -> list[int]:
    """Clients of a round: uniform without replacement, in ascending order.

    >>> sample_cohort(seed=0, round=3, population=10, size=10)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if size == population:
        return list(range(population))
    drawn = generator(seed, round, 0, Purpose.COHORT).choice(population, size, replace=False, shuffle=False)
    return np.sort(drawn).tolist()
