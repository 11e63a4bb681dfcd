"""Clients, validation and test data, as the loop takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lightning import LightningDataModule
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from lightning_feddua.data.client_data import ClientData, Collate
from lightning_feddua.errors import ConfigurationError


class FederatedDataModule(LightningDataModule):
    """The clients' datasets by name, and the data on which the global model is validated and tested.

    It is an ordinary LightningDataModule as well: under Trainer, ``train_dataloader`` pools all clients.

    Args:
        clients: a map-style dataset for each client. Those of a ``TensorDataset`` are indexed as tensors.
        val_dataset: for validation after rounds; None for no validation.
        test_dataset: for the final test.
        batch_size: the size of a local minibatch; a client with fewer samples uses all of them in each step.
        eval_batch_size: the size of a batch in validation and test.
        collate_fn: makes a batch of a list of samples, as in a DataLoader.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> def client(n):
        ...     return TensorDataset(torch.randn(n, 3), torch.randn(n, 1))
        >>> FederatedDataModule({"alice": client(5), "bob": client(7)}, batch_size=4)
        FederatedDataModule(2 clients, 12 samples)
    """

    def __init__(
        self,
        clients: Mapping[str, Dataset[Any]],
        val_dataset: Dataset[Any] | None = None,
        test_dataset: Dataset[Any] | None = None,
        batch_size: int = 50,
        eval_batch_size: int = 256,
        collate_fn: Collate | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if value < 1:
                raise ConfigurationError(f"`{name}={value}` is less than 1.", "Give the number of samples in a batch.")
        self.clients = clients
        self.val_dataset = val_dataset
        self.test_dataset = test_dataset
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.collate_fn = collate_fn

    @classmethod
    def from_dataset(
        cls, dataset: Dataset[Any], partition: Sequence[Sequence[int] | np.ndarray] | Mapping[str, Any], **kwargs: Any
    ) -> FederatedDataModule:
        """Clients that share one dataset.

        Args:
            dataset: a map-style dataset.
            partition: for each client the indices of its samples: a list of index arrays, or a mapping by client name.
            **kwargs: the other arguments of :class:`FederatedDataModule`.
        """
        if not isinstance(partition, Mapping):
            partition = {str(i): indices for i, indices in enumerate(partition)}
        return cls({name: Subset(dataset, np.asarray(i)) for name, i in partition.items()}, **kwargs)  # type: ignore[arg-type]

    @property
    def client_ids(self) -> list[str]:
        """The clients' names, in the order that cohorts refer to."""
        return list(self.clients)

    def client_data(self, client_id: str) -> ClientData:
        """A client's samples, ready to be indexed."""
        return ClientData(self.clients[client_id], self.collate_fn)

    def train_dataloader(self) -> DataLoader[Any]:
        """All clients' samples together, for a centralised baseline under Trainer."""
        pooled: ConcatDataset[Any] = ConcatDataset(list(self.clients.values()))
        return DataLoader(pooled, self.batch_size, shuffle=True, collate_fn=self.collate_fn)

    def val_dataloader(self) -> Any:
        """The validation data under Trainer."""
        return self._eval_dataloader(self.val_dataset)

    def test_dataloader(self) -> Any:
        """The test data under Trainer."""
        return self._eval_dataloader(self.test_dataset)

    def _eval_dataloader(self, dataset: Dataset[Any] | None) -> Any:
        return [] if dataset is None else DataLoader(dataset, self.eval_batch_size, collate_fn=self.collate_fn)

    def __repr__(self) -> str:
        samples = sum(len(self.client_data(client_id)) for client_id in self.client_ids)
        return f"{type(self).__name__}({len(self.clients)} clients, {samples:,} samples)"
