"""Datasets whose clients are given by nature."""

import numpy as np

from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.data.partition import Partition
from lightning_feddua.errors import ConfigurationError


class NaturalDataModule(FederatedDataModule):
    """Some of a dataset's natural clients, each split into a part to train on and a part that is pooled for validation.

    Args:
        path: a hub id, or a local folder with the files that the hub has.
        num_clients: the number of clients, drawn at random; None for all.
        min_samples: the least number of samples of a client.
        train_fraction: the part of a client's samples that is trained on.
        batch_size: the size of a local minibatch.
        eval_batch_size: the size of a batch in validation.
        seed: of the choice of clients and of their split.
    """

    def __init__(
        self,
        path: str,
        num_clients: int | None = 100,
        min_samples: int = 100,
        train_fraction: float = 0.9,
        batch_size: int = 50,
        eval_batch_size: int = 500,
        seed: int = 0,
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

    def choose_clients(self, rng: np.random.Generator, partition: Partition) -> np.ndarray:
        """Places of the clients to take part."""
        if self.num_clients is None:
            return np.arange(len(partition))
        if not 1 <= self.num_clients <= len(partition):
            raise ConfigurationError(
                f"`num_clients={self.num_clients}` is not possible with {len(partition)} clients of"
                f" {self.min_samples} samples or more.",
                "Choose fewer, None for all, or a smaller `min_samples`.",
            )
        return np.sort(rng.choice(len(partition), self.num_clients, replace=False))
