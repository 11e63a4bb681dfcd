"""Clients, validation and test data, as the loop takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from lightning_feddua.data.client_data import ClientData, Collate
from lightning_feddua.data.partition import Partition
from lightning_feddua.data.partitioners import NaturalPartitioner, Partitioner
from lightning_feddua.errors import ConfigurationError, choices

# Who gets which rows: index arrays, a mapping of them by client name, or a partitioner.
PartitionLike = Sequence[Sequence[int] | np.ndarray] | np.ndarray | Mapping[str, Any] | Partitioner


class FederatedDataModule(LightningDataModule):
    """The clients' datasets by name, and the data on which the global model is validated and tested.

    It is an ordinary LightningDataModule as well: under Trainer, ``train_dataloader`` pools all clients. A subclass may
    set its data in ``setup``, and has Lightning's hooks (``prepare_data``, ``on_after_batch_transfer``, …).

    Args:
        clients: a map-style dataset for each client. Those of a ``TensorDataset`` are indexed as tensors. A mapping
            that makes a dataset when it is asked for one, is asked for those of cohorts alone where ``local_steps`` are
            given; for ``local_epochs`` it needs an attribute ``sizes``, an array, or else all are made once to count
            their samples. With ``ids``, a sequence of its keys, a million names are not listed either.
        val_dataset: for validation after rounds; None for no validation.
        test_dataset: for the final test.
        batch_size: the size of a local minibatch; a client with fewer samples uses all of them in each step.
        eval_batch_size: the size of a batch in validation and test.
        collate_fn: makes a batch of a list of samples, as in a DataLoader.
        val_clients: data held out for each client, for validation per client; by default the clients' own data.
        num_workers: processes on each rank that prepare the next minibatches and clients while others train, where
            samples are not tensors in memory.

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
                f"The clients are a `{type(clients).__name__}`.", "Give a mapping of datasets by client name."
            )
        for name, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if value < 1:
                raise ConfigurationError(f"`{name}={value}` is less than 1.", "Give the number of samples in a batch.")
        if num_workers < 0:
            raise ConfigurationError(f"`num_workers={num_workers}` is less than 0.", "Give a number of processes.")
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
            partition: for each client the indices of its samples: a list of index arrays, a mapping of them by client
                name, or a partitioner.
            labels: the label of each sample, for a partitioner. They may be left out where the dataset has them as
                ``targets`` or ``labels``, or is a ``TensorDataset`` whose last tensor is of integers.
            **kwargs: the other arguments of :class:`FederatedDataModule`.
        """
        return cls(make_partition(dataset, partition, labels), **kwargs)

    @classmethod
    def from_datamodule(
        cls, datamodule: LightningDataModule, partition: PartitionLike, labels: np.ndarray | None = None
    ) -> FederatedDataModule:
        """Clients that share the training data of a LightningDataModule written for Trainer.

        Batch size, collation, validation and test data, and batch-transfer hooks are the data module's own. The order
        of samples is the loop's, and with ``local_epochs`` a pass ends with what is left, also under ``drop_last``.

        Args:
            datamodule: any LightningDataModule with map-style datasets.
            partition: as in :meth:`from_dataset`.
            labels: as in :meth:`from_dataset`.
        """
        return _WrappedDataModule(datamodule, partition, labels)

    @classmethod
    def from_huggingface(cls, path: str, **kwargs: Any) -> FederatedDataModule:
        """Clients of a Hugging Face dataset.

        Args:
            path: a hub id, or a local folder with the files that the hub has.
            **kwargs: the other arguments of :class:`~lightning_feddua.data.HuggingFaceDataModule`.
        """
        from lightning_feddua.data.huggingface import HuggingFaceDataModule

        return HuggingFaceDataModule(path, **kwargs)

    @property
    def client_ids(self) -> Sequence[str]:
        """The clients' names, in the order that cohorts refer to."""
        ids = getattr(self.clients, "ids", None)
        return list(self.clients) if ids is None else ids

    @property
    def sizes_are_known(self) -> bool:
        """Whether the clients' sizes can be told without making their datasets."""
        return isinstance(self.clients, dict) or hasattr(self.clients, "sizes")

    def client_sizes(self) -> np.ndarray:
        """The number of samples of each client."""
        sizes = getattr(self.clients, "sizes", None)
        if sizes is not None:
            return np.asarray(sizes)
        return np.fromiter((dataset_size(*item) for item in self.clients.items()), dtype=np.int64)

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
        """The data of a stage and the size of its batches; None where there is none."""
        dataset = self.val_dataset if stage == "validation" else self.test_dataset
        return None if dataset is None else (ClientData(dataset, self.collate_fn), self.eval_batch_size)

    def label_counts(self) -> np.ndarray:
        """The number of samples of each client (row) and label (column)."""
        if isinstance(self.clients, Partition):
            labels, rows = self._labels_of_rows(self.clients.dataset), list(self.clients.items_by_rows())
            classes, codes = np.unique(labels, return_inverse=True)
            return np.stack([np.bincount(codes[mine], minlength=len(classes)) for _, mine in rows])
        parts = [labels_of(dataset) for dataset in self.clients.values()]
        classes = np.unique(np.concatenate(parts))
        return np.stack([np.bincount(np.searchsorted(classes, p), minlength=len(classes)) for p in parts])

    def _labels_of_rows(self, dataset: Dataset[Any]) -> np.ndarray:
        return labels_of(dataset)

    @property
    def hook_owner(self) -> LightningDataModule:
        """The data module whose batch-transfer hooks count, and which the module finds at ``self.trainer``."""
        return self

    def train_dataloader(self) -> Any:
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
        sizes = self.client_sizes()
        return f"{type(self).__name__}({len(sizes):,} clients, {sizes.sum():,} samples)"

    __str__ = __repr__


class _WrappedDataModule(FederatedDataModule):
    """Another LightningDataModule's training data, partitioned."""

    def __init__(self, datamodule: LightningDataModule, partition: PartitionLike, labels: np.ndarray | None) -> None:
        super().__init__({})
        self._wrapped = datamodule
        self._partition = partition
        self._labels = None if labels is None else np.asarray(labels)

    @property
    def hook_owner(self) -> LightningDataModule:
        return self._wrapped

    def prepare_data(self) -> None:
        self._wrapped.prepare_data()

    def setup(self, stage: str) -> None:
        # The clients are needed in every stage, and many data modules have them in "fit" only.
        for part in dict.fromkeys(("fit", stage)):
            self._wrapped.setup(part)
        loader = _single_loader(self._wrapped, "train_dataloader")
        assert loader is not None
        self.clients = make_partition(loader.dataset, self._partition, self._labels)
        self.batch_size = _batch_size(loader)
        self.collate_fn = _custom_collate(loader)

    def teardown(self, stage: str) -> None:
        self._wrapped.teardown(stage)

    def evaluation_data(self, stage: Literal["validation", "test"]) -> tuple[ClientData, int] | None:
        loader = _single_loader(self._wrapped, "val_dataloader" if stage == "validation" else "test_dataloader")
        return None if loader is None else (ClientData(loader.dataset, _custom_collate(loader)), _batch_size(loader))

    def _labels_of_rows(self, dataset: Dataset[Any]) -> np.ndarray:
        return labels_of(dataset) if self._labels is None else self._labels


def _single_loader(datamodule: LightningDataModule, name: str) -> DataLoader[Any] | None:
    owner = type(datamodule).__name__
    loader = getattr(datamodule, name)() if is_overridden(name, datamodule) else None
    if isinstance(loader, list | tuple) and len(loader) <= 1:
        loader = loader[0] if loader else None
    if loader is None and name != "train_dataloader":
        return None
    if not isinstance(loader, DataLoader) or not _is_map_style(loader.dataset):
        raise ConfigurationError(
            f"`{owner}.{name}` returned a `{type(loader).__name__}` that cannot be indexed.",
            "Return one DataLoader over a map-style dataset.",
        )
    _check_sampler(owner, name, loader)
    return loader


def _check_sampler(owner: str, name: str, loader: DataLoader[Any]) -> None:
    """One clear error for rows that are not drawn plainly: the loop would draw others."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    plain = type(sampler) in (SequentialSampler, DistributedSampler) or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )
    if not plain:
        raise ConfigurationError(
            f"`{owner}.{name}` draws its rows with a `{type(sampler).__name__}`, and here the loop draws them.",
            "Leave the sampler out; where it chooses among the rows, make the dataset a `Subset`.",
        )


def _batch_size(loader: DataLoader[Any]) -> int:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        raise ConfigurationError(
            f"The batch size of a DataLoader with a `{type(loader.batch_sampler).__name__}` cannot be seen.",
            "Give the DataLoader a `batch_size`, or the sampler an attribute of this name.",
        )
    return int(size)


def _custom_collate(loader: DataLoader[Any]) -> Collate | None:
    return None if loader.collate_fn is default_collate else loader.collate_fn


def _is_map_style(dataset: Any) -> bool:
    # An IterableDataset inherits a `__getitem__` that it does not have.
    is_sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return is_sized and not isinstance(dataset, IterableDataset)


def dataset_size(name: str, dataset: Dataset[Any]) -> int:
    """The number of samples of a client; one clear error where it cannot be indexed."""
    if not _is_map_style(dataset):
        raise ConfigurationError(
            f"The dataset of client `{name}` is a `{type(dataset).__name__}`, which cannot be indexed.",
            "Give each client a map-style dataset, with `__len__` and `__getitem__`.",
        )
    return len(dataset)  # type: ignore[arg-type]


def make_partition(dataset: Dataset[Any], partition: PartitionLike, labels: np.ndarray | None = None) -> Partition:
    """Clients of a dataset by index arrays or by a partitioner."""
    if isinstance(partition, str) or not isinstance(partition, Partitioner | Mapping | Sequence | np.ndarray):
        raise ConfigurationError(
            f"The partition is `{partition!r:.100}`.", "Give index arrays, one for each client, or a partitioner."
        )
    if isinstance(partition, Partitioner):
        labels = labels_of(dataset) if labels is None else np.asarray(labels)
        rows = len(dataset)  # type: ignore[arg-type]
        if labels.shape != (rows,):
            raise ConfigurationError(
                f"The labels have the shape {labels.shape}, and the dataset has {rows} rows.",
                "Give one label for each row.",
            )
        if isinstance(partition, NaturalPartitioner):
            return Partition.from_values(dataset, labels)
        partition = partition.partition(labels)
    return Partition.from_indices(dataset, partition)


def labels_of(dataset: Dataset[Any]) -> np.ndarray:
    """The labels of a dataset that keeps them in the open."""
    if isinstance(dataset, Subset):
        return labels_of(dataset.dataset)[np.asarray(dataset.indices)]
    labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if labels is None and isinstance(dataset, TensorDataset):
        last = dataset.tensors[-1]
        labels = last if last.dim() == 1 and not last.is_floating_point() else None
    if labels is None:
        raise ConfigurationError(
            f"A `{type(dataset).__name__}` shows no labels: no `targets`, no `labels`, no last tensor of integers.",
            "Use data with classes, or give the labels as an argument of `from_dataset`.",
        )
    return labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
