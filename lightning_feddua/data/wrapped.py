"""A LightningDataModule written for Trainer, with its training data split into clients."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from lightning import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, default_collate

from lightning_feddua.data.client_data import ClientData, Collate
from lightning_feddua.data.module import FederatedDataModule, is_map_style
from lightning_feddua.data.splits import PartitionLike, make_partition
from lightning_feddua.errors import ConfigurationError


class WrappedDataModule(FederatedDataModule):
    """Clients that share the training data of a LightningDataModule written for Trainer.

    Args:
        datamodule: any LightningDataModule with map-style datasets.
        partition: index arrays, a mapping from client names to index arrays, or a partitioner.
        labels: the label of each sample, for a partitioner; None to find them in the dataset.
    """

    def __init__(
        self, datamodule: LightningDataModule, partition: PartitionLike, labels: np.ndarray | None = None
    ) -> None:
        super().__init__({})
        self._wrapped = datamodule
        self._partition = partition
        self._labels = labels

    @property
    def hook_owner(self) -> LightningDataModule:
        """The wrapped data module."""
        return self._wrapped

    def prepare_data(self) -> None:
        """Prepare the data of the wrapped data module."""
        self._wrapped.prepare_data()

    def setup(self, stage: str) -> None:
        """Set up the wrapped data module, and split its training data."""
        # The clients are needed in every stage, and many data modules set them up in "fit" only.
        for part in dict.fromkeys(("fit", stage)):
            self._wrapped.setup(part)
        loader = _single_loader(self._wrapped, "train_dataloader")
        assert loader is not None
        self.clients = make_partition(loader.dataset, self._partition, self._labels)
        self.batch_size = _batch_size(loader)
        self.collate_fn = _custom_collate(loader)

    def teardown(self, stage: str) -> None:
        """Tear down the wrapped data module."""
        self._wrapped.teardown(stage)

    def evaluation_data(self, stage: Literal["validation", "test"]) -> tuple[ClientData, int] | None:
        """The data of the wrapped data module's own loader and its batch size; None if it has no loader."""
        loader = _single_loader(self._wrapped, "val_dataloader" if stage == "validation" else "test_dataloader")
        return None if loader is None else (ClientData(loader.dataset, _custom_collate(loader)), _batch_size(loader))


def _single_loader(datamodule: LightningDataModule, name: str) -> DataLoader[Any] | None:
    owner = type(datamodule).__name__
    loader = getattr(datamodule, name)() if is_overridden(name, datamodule) else None
    if isinstance(loader, list | tuple) and len(loader) <= 1:
        loader = loader[0] if loader else None
    if loader is None and name != "train_dataloader":
        return None
    if not isinstance(loader, DataLoader) or not is_map_style(loader.dataset):
        raise ConfigurationError(
            f"`{owner}.{name}` returned a `{type(loader).__name__}` that cannot be indexed.",
            "Return one DataLoader over a map-style dataset.",
        )
    _check_sampler(owner, name, loader)
    return loader


def _check_sampler(owner: str, name: str, loader: DataLoader[Any]) -> None:
    """One clear error for a sampler that the loop would ignore, because it draws the rows itself."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    plain = type(sampler) in (SequentialSampler, DistributedSampler) or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )
    if not plain:
        raise ConfigurationError(
            f"`{owner}.{name}` draws its rows with a `{type(sampler).__name__}`, and the loop would ignore it.",
            "Remove the sampler; to use some of the rows only, make the dataset a `Subset`.",
        )


def _batch_size(loader: DataLoader[Any]) -> int:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        raise ConfigurationError(
            f"The batch size of a DataLoader with a `{type(loader.batch_sampler).__name__}` is unknown.",
            "Give the DataLoader a `batch_size`, or the sampler an attribute `batch_size`.",
        )
    return int(size)


def _custom_collate(loader: DataLoader[Any]) -> Collate | None:
    return None if loader.collate_fn is default_collate else loader.collate_fn
