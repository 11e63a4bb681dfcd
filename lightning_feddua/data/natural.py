"""Datasets in which each row belongs to a client, such as a writer."""

from abc import ABC, abstractmethod

import numpy as np

from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.data.partition import Partition
from lightning_feddua.errors import ConfigurationError


class NaturalDataModule(FederatedDataModule, ABC):
    """A random choice of a dataset's clients, each with a part for training and a part for validation.

    The base of such data modules. A subclass has the same arguments, with defaults, and documents them.
    """

    def __init__(
        self,
        path: str,
        num_clients: int | None,
        min_samples: int,
        train_fraction: float,
        batch_size: int,
        eval_batch_size: int,
        seed: int,
    ) -> None:
        super().__init__({}, batch_size=batch_size, eval_batch_size=eval_batch_size)
        if not 0 < train_fraction < 1:
            raise ConfigurationError(
                f"`train_fraction={train_fraction}` leaves nothing to train on or to validate on.",
                "Choose a number between 0 and 1, such as 0.9.",
            )
        self.path = path
        self.num_clients = num_clients
        self.min_samples = min_samples
        self.train_fraction = train_fraction
        self.seed = seed

    @abstractmethod
    def setup(self, stage: str) -> None:
        """Load the dataset, and set the clients and the data for validation."""

    def choose_clients(self, rng: np.random.Generator, partition: Partition) -> np.ndarray:
        """The indices of ``num_clients`` random clients of a partition, in ascending order."""
        if self.num_clients is None:
            return np.arange(len(partition))
        if not 1 <= self.num_clients <= len(partition):
            raise ConfigurationError(
                f"`num_clients={self.num_clients}` is not possible with {len(partition)} clients of"
                f" {self.min_samples} samples or more.",
                "Choose fewer, None for all, or a smaller `min_samples`.",
            )
        return np.sort(rng.choice(len(partition), self.num_clients, replace=False))
