"""The clients' data and the validation and test data, as the loop takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from lightning import LightningDataModule
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from lightning_feddua.checks import check_flag, check_whole
from lightning_feddua.data.client_data import ClientData, Collate
from lightning_feddua.data.evaluation_data import EvaluationSet, Stage, sets_of, several
from lightning_feddua.data.held_out import hold_out, pooled
from lightning_feddua.data.partition import Partition
from lightning_feddua.data.splits import PartitionLike, labels_of, make_partition
from lightning_feddua.data.streams import WeightedPartition, dataset_size, is_stream, read_client
from lightning_feddua.errors import ConfigurationError, choices


class FederatedDataModule(LightningDataModule):
    """The clients' datasets by name, and the data on which the global model is validated and tested.

    It is also an ordinary LightningDataModule: under Trainer, ``train_dataloader`` pools all clients. A subclass may
    set its data in ``setup``, and may use Lightning's hooks (``prepare_data``, ``on_after_batch_transfer``, …).

    Args:
        clients: a map-style dataset for each client. Subsets of a ``TensorDataset`` are indexed as tensors. The mapping
            may create a dataset on access: with ``local_steps``, only the clients of a cohort are created; with
            ``local_epochs``, all are created once to count their samples, unless the mapping has an array ``sizes``.
            A mapping with ``ids``, a sequence of its keys, does not have to list a million names. A client may also be
            a DataLoader, whose batches are used as they come, or an ``IterableDataset``, which is read in its own
            order; both draw their random numbers from the run's seed.
        val_dataset: the data for validation, or a list of several; None for no validation. DataLoaders and
            ``IterableDataset``s are allowed.
        test_dataset: the data for the final test; likewise.
        batch_size: the size of a local minibatch. A client with fewer samples uses all of them in each step.
        eval_batch_size: the batch size in validation and test.
        collate_fn: turns a list of samples into a batch, as in a DataLoader.
        val_clients: held-out data of each client, for validation per client; by default the clients' own data. A
            fraction holds out this part of each client's samples, at random; all that is held out is then the
            validation data as well, unless ``val_dataset`` is given.
        num_workers: the number of processes per rank that prepare the next minibatches while other clients train. Not
            used for samples that are tensors in memory.
        drop_last: whether a pass (``local_epochs``) leaves out a last minibatch that is smaller than the others. A
            client with fewer samples than a minibatch still uses all of them.
        predict_dataset: the data for :meth:`FederatedLoop.predict`; the test data by default.
        split_seed: the seed by which a fraction of the samples is held out.

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
        clients: Mapping[str, Any],
        val_dataset: Any = None,
        test_dataset: Any = None,
        batch_size: int = 50,
        eval_batch_size: int = 256,
        collate_fn: Collate | None = None,
        val_clients: Mapping[str, Any] | float | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
        predict_dataset: Any = None,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(clients, Mapping):
            raise ConfigurationError(
                f"The clients are a `{type(clients).__name__}`.", "Give a mapping from client names to datasets."
            )
        check_whole("batch_size", batch_size, least=1)
        check_whole("eval_batch_size", eval_batch_size, least=1)
        check_whole("num_workers", num_workers, least=0)
        check_flag("drop_last", drop_last)
        self.val_dataset = val_dataset
        self.test_dataset = test_dataset
        self.predict_dataset = predict_dataset
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.collate_fn = collate_fn
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.set_clients(clients, val_clients, split_seed)

    def set_clients(
        self, clients: Mapping[str, Any], val_clients: Mapping[str, Any] | float | None = None, split_seed: int = 0
    ) -> None:
        """Set the clients and what is held out of each.

        Args:
            clients: as in the constructor.
            val_clients: likewise.
            split_seed: likewise.
        """
        if isinstance(val_clients, float | int):
            clients, val_clients = hold_out(clients, val_clients, split_seed)
            self.val_dataset = pooled(val_clients) if self.val_dataset is None else self.val_dataset
        self.clients, self.val_clients = clients, val_clients

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
        cls,
        datamodule: LightningDataModule,
        partition: PartitionLike,
        labels: np.ndarray | None = None,
        val_clients: PartitionLike | float | None = None,
        split_seed: int = 0,
    ) -> FederatedDataModule:
        """Clients that share the training data of a LightningDataModule written for Trainer.

        Batch size, ``drop_last``, collation, validation and test data, and batch-transfer hooks are those of the data
        module. The loop shuffles the samples.

        Args:
            datamodule: any LightningDataModule whose training data is a map-style dataset.
            partition: as in :meth:`from_dataset`.
            labels: as in :meth:`from_dataset`.
            val_clients: the part of the validation data that belongs to each client, given like ``partition``; or a
                fraction, which holds out this part of each client's training samples.
            split_seed: the seed by which a fraction of the samples is held out.
        """
        from lightning_feddua.data.wrapped import WrappedDataModule

        return WrappedDataModule(datamodule, partition, labels, val_clients, split_seed)

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
        """Whether the clients' sizes are known without creating all datasets; a stream's may be unknown even then."""
        return isinstance(self.clients, dict) or hasattr(self.clients, "sizes")

    def client_sizes(self, on_error: Callable[[str, Exception], None] | None = None) -> np.ndarray:
        """The number of samples of each client; -1 for a stream that does not tell.

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
        return self.read(dataset)

    def read(self, dataset: Any, held_out: bool = False) -> ClientData:
        """A client's dataset, ready to be read.

        Args:
            dataset: the dataset.
            held_out: whether it is one of ``val_clients``.
        """
        return read_client(dataset, self.batch_size, self.collate_fn)

    @property
    def has_streams(self) -> bool:
        """Whether any client is known to be a DataLoader or a stream."""
        several = isinstance(self.clients, dict) and any(map(is_stream, self.clients.values()))
        return several or isinstance(self.clients, WeightedPartition)

    def evaluation_data(self, stage: Stage) -> list[EvaluationSet]:
        """The datasets of a stage; none if there is no data."""
        predict = self.test_dataset if self.predict_dataset is None else self.predict_dataset
        data = {"validation": self.val_dataset, "test": self.test_dataset, "predict": predict}[stage]
        return sets_of(data, self.eval_batch_size, self.collate_fn)

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
        if self.has_streams:
            raise ConfigurationError(
                "Clients that are DataLoaders or streams cannot be pooled.", "Give Trainer a loader of your own."
            )
        together: ConcatDataset[Any] = ConcatDataset(list(self.clients.values()))
        return DataLoader(together, self.batch_size, shuffle=True, collate_fn=self.collate_fn, drop_last=self.drop_last)

    def val_dataloader(self) -> Any:
        """The validation data under Trainer."""
        return self._eval_dataloader(self.val_dataset)

    def test_dataloader(self) -> Any:
        """The test data under Trainer."""
        return self._eval_dataloader(self.test_dataset)

    def predict_dataloader(self) -> Any:
        """The data for prediction under Trainer."""
        return self._eval_dataloader(self.test_dataset if self.predict_dataset is None else self.predict_dataset)

    def _eval_dataloader(self, data: Any) -> Any:
        loaders = [
            one
            if isinstance(one, DataLoader)
            else DataLoader(one, batch_size=self.eval_batch_size, collate_fn=self.collate_fn)
            for one in several(data)
        ]
        return loaders[0] if len(loaders) == 1 else loaders

    def __repr__(self) -> str:
        sizes = self.client_sizes()
        known = f"{sizes.sum():,}" if (sizes >= 0).all() else "unknown number of"
        return f"{type(self).__name__}({len(sizes):,} clients, {known} samples)"

    __str__ = __repr__


def as_datamodule(datamodule: Any) -> FederatedDataModule:
    """A data module, or a mapping of datasets made into one."""
    if isinstance(datamodule, Mapping):
        return FederatedDataModule(datamodule)
    if not isinstance(datamodule, FederatedDataModule):
        raise ConfigurationError(
            f"The data is a `{type(datamodule).__name__}`, which has no clients.",
            "Give a `FederatedDataModule`, or a mapping of datasets by client name.",
        )
    return datamodule
