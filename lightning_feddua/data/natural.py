"""Datasets whose clients are given by nature."""

import numpy as np

from lightning_feddua.data.partition import Partition
from lightning_feddua.errors import ConfigurationError


def choose_clients(rng: np.random.Generator, partition: Partition, count: int | None) -> np.ndarray:
    """Places of some clients, drawn at random; of all for None."""
    if count is None:
        return np.arange(len(partition))
    if count > len(partition):
        raise ConfigurationError(
            f"`num_clients={count}` is more than the {len(partition)} clients with enough samples.",
            "Choose fewer, None for all, or a smaller `min_samples`.",
        )
    return np.sort(rng.choice(len(partition), count, replace=False))
