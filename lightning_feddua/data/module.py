"""The clients' data and the validation and test data, as the loop takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
from lightning import LightningDataModule
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

from lightning_feddua.checks import check_whole
from lightning_feddua.data.client_data import ClientData, Collate
from lightning_feddua.data.partition import Partition
from lightning_feddua.data.splits import PartitionLike, labels_of, make_partition
from lightning_feddua.errors import ConfigurationError, choices


class FederatedDataModule(LightningDataModule):
    """The clients' datasets by name, and the data on which the global model is validated and tested.

    It is also an ordinary LightningDataModule: under Trainer, ``train_dataloader`` pools all clients. A subclass may
    set its data in ``setup``, and may use Lightning's hooks (``prepare_data``, ``on_after_batch_transfer``, …).

    Args:
        clients: a map-style dataset for each client. Subsets of a ``TensorDataset`` are indexed as tensors. The mapping
            may create a dataset on access: with ``local_steps``, only the clients of a cohort are created; with
            ``local_epochs``, all are created once to count their samples, unless the mapping has an array ``sizes``.
            A mapping with ``ids``, a sequence of its keys, does not have to list a million names.
        val_dataset: the data for validation; None for no validation.
        test_dataset: the data for the final test.
        batch_size: the size of a local minibatch. A client with fewer samples uses all of them in each step.
        eval_batch_size: the batch size in validation and test.
        collate_fn: turns a list of samples into a batch, as in a DataLoader.
        val_clients: held-out data of each client, for validation per client; by default the clients' own data.
        num_workers: the number of processes per rank that prepare the next minibatches while other clients train. Not
            used for samples that are tensors in memory.

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
        val_clients: Mapping[str, Dataset[Any]] | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(clients, Mapping):
            raise ConfigurationError(
                f"The clients are a `{type(clients).__name__}`.", "Give a mapping from client names to datasets."
            )
        check_whole("batch_size", batch_size, least=1)
        check_whole("eval_batch_size", eval_batch_size, least=1)
        check_whole("num_workers", num_workers, least=0)
        self.clients = clients
        self.val_dataset = val_dataset
        self.test_dataset = test_dataset
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.collate_fn = collate_fn
        self.val_clients = val_clients
        self.num_workers = num_workers

    @classmethod
    def from_dataset(
        cls, dataset: Dataset[Any], partition: PartitionLike, labels: np.ndarray | None = None, **kwargs: Any
    ) -> FederatedDataModule:
        """Clients that share one dataset.

        Args:
            dataset: a map-style dataset.
            partition: the indices of each client's samples: a list of index arrays, a mapping from client names to
                index arrays, or a partitioner.
            labels: the label of each sample, for a partitioner. Not needed if the dataset has them as ``targets`` or
                ``labels``, or is a ``TensorDataset`` whose last tensor holds integers.
            **kwargs: the other arguments of :class:`FederatedDataModule`.
        """
        return cls(make_partition(dataset, partition, labels), **kwargs)

    @classmethod
    def from_datamodule(
        cls, datamodule: LightningDataModule, partition: PartitionLike, labels: np.ndarray | None = None
    ) -> FederatedDataModule:
        """Clients that share the training data of a LightningDataModule written for Trainer.

        Batch size, collation, validation and test data, and batch-transfer hooks are those of the data module. The
        loop shuffles the samples. With ``local_epochs``, the last minibatch of a pass may be smaller, even with
        ``drop_last``.

        Args:
            datamodule: any LightningDataModule with map-style datasets.
            partition: as in :meth:`from_dataset`.
            labels: as in :meth:`from_dataset`.
        """
        from lightning_feddua.data.wrapped import WrappedDataModule

        return WrappedDataModule(datamodule, partition, labels)

    @classmethod
    def from_huggingface(cls, path: str, **kwargs: Any) -> FederatedDataModule:
        """Clients of a Hugging Face dataset.

        Args:
            path: a hub id, or a local folder with the same files.
            **kwargs: the other arguments of :class:`~lightning_feddua.data.HuggingFaceDataModule`.
        """
        from lightning_feddua.data.huggingface import HuggingFaceDataModule

        return HuggingFaceDataModule(path, **kwargs)

    @property
    def client_ids(self) -> Sequence[str]:
        """The names of the clients. Cohorts refer to clients by their place in it."""
        ids = getattr(self.clients, "ids", None)
        return list(self.clients) if ids is None else ids

    @property
    def sizes_are_known(self) -> bool:
        """Whether the clients' sizes are known without creating all datasets."""
        return isinstance(self.clients, dict) or hasattr(self.clients, "sizes")

    def client_sizes(self, on_error: Callable[[str, Exception], None] | None = None) -> np.ndarray:
        """The number of samples of each client.

        Args:
            on_error: called with the name of a client whose dataset cannot be created or measured, and the exception.
                The client then counts as empty. If None, the exception is raised.
        """
        sizes = getattr(self.clients, "sizes", None)
        if sizes is not None:
            return np.asarray(sizes)
        return np.fromiter((self._client_size(name, on_error) for name in self.client_ids), dtype=np.int64)

    def _client_size(self, name: str, on_error: Callable[[str, Exception], None] | None) -> int:
        try:
            return dataset_size(name, self.clients[name])
        except Exception as error:
            if on_error is None:
                raise
            on_error(str(name), error)
            return 0

    def client_data(self, client_id: str) -> ClientData:
        """A client's samples, ready to be indexed."""
        try:
            dataset = self.clients[client_id]
        except KeyError:
            known = [str(name) for name in islice(self.clients, 11)]
            more = " and so on" if len(known) > 10 else ""
            raise ConfigurationError(
                f"There is no client `{client_id}`.", f"Choose one of {choices(known[:10])}{more}."
            ) from None
        return ClientData(dataset, self.collate_fn)

    def evaluation_data(self, stage: Literal["validation", "test"]) -> tuple[ClientData, int] | None:
        """The data of a stage and its batch size; None if there is no data."""
        dataset = self.val_dataset if stage == "validation" else self.test_dataset
        return None if dataset is None else (ClientData(dataset, self.collate_fn), self.eval_batch_size)

    def label_counts(self) -> np.ndarray:
        """The number of samples of each client (row) and label (column)."""
        if isinstance(self.clients, Partition):
            labels = self.clients.labels if self.clients.labels is not None else labels_of(self.clients.dataset)
            classes, codes = np.unique(labels, return_inverse=True)
            rows_by_name = self.clients.items_by_rows()
            return np.stack([np.bincount(codes[rows], minlength=len(classes)) for _, rows in rows_by_name])
        parts = [labels_of(dataset) for dataset in self.clients.values()]
        classes = np.unique(np.concatenate(parts))
        return np.stack([np.bincount(np.searchsorted(classes, p), minlength=len(classes)) for p in parts])

    @property
    def hook_owner(self) -> LightningDataModule:
        """The data module whose batch-transfer hooks are used, and which a module sees as ``trainer.datamodule``."""
        return self

    def train_dataloader(self) -> Any:
        """The samples of all clients, for a centralised baseline under Trainer."""
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
        sizes = self.client_sizes()
        return f"{type(self).__name__}({len(sizes):,} clients, {sizes.sum():,} samples)"

    __str__ = __repr__


def is_map_style(dataset: Any) -> bool:
    """Whether a dataset has a length and can be indexed."""
    # An IterableDataset inherits a `__getitem__` that it does not have.
    is_sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return is_sized and not isinstance(dataset, IterableDataset)


def dataset_size(name: str, dataset: Dataset[Any]) -> int:
    """The number of samples of a client's dataset; one clear error if it cannot be indexed."""
    if not is_map_style(dataset):
        raise ConfigurationError(
            f"The dataset of client `{name}` is a `{type(dataset).__name__}`, which cannot be indexed.",
            "Give each client a map-style dataset, with `__len__` and `__getitem__`.",
        )
    return len(dataset)  # type: ignore[arg-type]
