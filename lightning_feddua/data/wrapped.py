"""A LightningDataModule written for Trainer, with its training data split into clients."""

from __future__ import annotations

from typing import Any

import numpy as np
from lightning import LightningDataModule
from torch.utils.data import BatchSampler, DataLoader, WeightedRandomSampler

from lightning_feddua.data.client_data import ClientData
from lightning_feddua.data.evaluation_data import (
    EvaluationSet,
    Stage,
    draws_every_row_once,
    own_collate,
    set_of_loader,
)
from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.data.partitioners import Partitioner
from lightning_feddua.data.splits import PartitionLike, make_partition
from lightning_feddua.data.streams import WeightedPartition, is_map_style
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.lightning_names import AnyDataModule, is_datamodule, is_overridden

_LOADERS = {"validation": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}


class WrappedDataModule(FederatedDataModule):
    """Clients that share the training data of a LightningDataModule written for Trainer.

    Args:
        datamodule: any LightningDataModule whose training data is a map-style dataset.
        partition: index arrays, a mapping from client names to index arrays, or a partitioner.
        labels: the label of each sample, for a partitioner; None to find them in the dataset.
        val_clients: the part of the validation data that belongs to each client, given like ``partition``; or a
            fraction, which holds out this part of each client's training samples.
        split_seed: the seed by which a fraction of the samples is held out.
    """

    def __init__(
        self,
        datamodule: LightningDataModule,
        partition: PartitionLike,
        labels: np.ndarray | None = None,
        val_clients: PartitionLike | float | None = None,
        split_seed: int = 0,
    ) -> None:
        super().__init__({})
        if not is_datamodule(datamodule):
            raise ConfigurationError(
                f"The data module is `{datamodule!r:.100}`.",
                "Give a `LightningDataModule`, in a recipe by `class_path`.",
            )
        self._wrapped = datamodule
        self._partition = partition
        self._labels = labels
        self._val_partition = val_clients
        self._split_seed = split_seed
        # The validation data, where it is divided among the clients.
        self._val_loader: DataLoader[Any] | None = None

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
        loader = self._train_loader()
        clients = make_partition(loader.dataset, self._partition, self._labels)
        self.batch_size = _batch_size(loader)
        self.drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
        self.collate_fn = own_collate(loader)
        val_clients: Any = self._val_partition
        self._val_loader = None
        if val_clients is not None and not isinstance(val_clients, float | int):
            self._val_loader = self._validation_loader()
            val_clients = make_partition(self._val_loader.dataset, val_clients)
            if extra := [str(name) for name in val_clients if name not in clients]:
                raise ConfigurationError(
                    f"`val_clients` has a part for `{extra[0]}`, and the training data has no such client.",
                    f"Divide the validation data among the {len(clients)} clients.",
                )
        self.val_dataset = None
        self.set_clients(clients, val_clients, self._split_seed)
        if isinstance(loader.sampler, WeightedRandomSampler):
            assert not isinstance(self.clients, dict)
            self.clients = WeightedPartition(self.clients, loader)  # type: ignore[arg-type]

    def read(self, dataset: Any, held_out: bool = False) -> ClientData:
        """A client's dataset, with the collation of the loader that it comes from."""
        if held_out and self._val_loader is not None:
            return ClientData(dataset, own_collate(self._val_loader))
        return super().read(dataset, held_out)

    def teardown(self, stage: str) -> None:
        """Tear down the wrapped data module."""
        self._wrapped.teardown(stage)

    def evaluation_data(self, stage: Stage) -> list[EvaluationSet]:
        """The data of the wrapped data module's own loaders, of which there may be none."""
        loaders = self._loaders(_LOADERS[stage])
        # What is held out of the clients, where the data module has no validation data of its own.
        return super().evaluation_data(stage) if not loaders else [set_of_loader(loader) for loader in loaders]

    def _loaders(self, name: str) -> list[Any]:
        """As Trainer takes them: one, or several in a list or a mapping."""
        returned = getattr(self._wrapped, name)() if is_overridden(name, self._wrapped) else None
        if returned is None:
            return []
        if isinstance(returned, dict):
            return list(returned.values())
        return list(returned) if isinstance(returned, list | tuple) else [returned]

    def _train_loader(self) -> DataLoader[Any]:
        owner, name = type(self._wrapped).__name__, "train_dataloader"
        loaders = self._loaders(name)
        loader = loaders[0] if len(loaders) == 1 else None
        if not isinstance(loader, DataLoader) or not is_map_style(loader.dataset):
            what = f"a `{type(loaders[0]).__name__}`" if len(loaders) == 1 else f"{len(loaders)} loaders"
            raise ConfigurationError(
                f"`{owner}.{name}` returned {what} whose rows cannot be dealt to clients.",
                "Return one DataLoader over a map-style dataset, or make a loader for each client and pass them as"
                " `FederatedDataModule({name: loader, ...})`.",
            )
        weighted = type(loader.sampler) is WeightedRandomSampler and loader.batch_size is not None
        own_batches = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
        if own_batches or not (weighted or draws_every_row_once(loader)):
            sampler = loader.batch_sampler if own_batches else getattr(loader.batch_sampler, "sampler", loader.sampler)
            raise ConfigurationError(
                f"`{owner}.{name}` draws its rows with a `{type(sampler).__name__}`, and the loop would ignore it.",
                "Remove the sampler; to use some of the rows only, make the dataset a `Subset`.",
            )
        return loader

    def _validation_loader(self) -> DataLoader[Any]:
        loaders = self._loaders("val_dataloader")
        if len(loaders) != 1 or not is_map_style(getattr(loaders[0], "dataset", None)):
            raise ConfigurationError(
                f"`val_clients` divides the validation data of `{type(self._wrapped).__name__}`, which is"
                f" {len(loaders)} loaders or cannot be indexed.",
                "Return one DataLoader over a map-style dataset from `val_dataloader`, or give a fraction.",
            )
        return loaders[0]


class PartitionedDataModule(WrappedDataModule):
    """A LightningDataModule written for Trainer, with its training data split by a partitioner, for recipes.

    Args:
        datamodule: any LightningDataModule, of ``lightning`` or ``pytorch_lightning``; in a recipe, its import path, or
            ``class_path`` and ``init_args``.
        partitioner: splits its training data.
        val_clients: a fraction of each client's training samples to hold out for validation per client.
        split_seed: the seed by which it is held out.
    """

    def __init__(
        self, datamodule: AnyDataModule, partitioner: Partitioner, val_clients: float | None = None, split_seed: int = 0
    ) -> None:
        super().__init__(datamodule, partitioner, val_clients=val_clients, split_seed=split_seed)


class PredictedDataModule(WrappedDataModule):
    """A LightningDataModule written for Trainer, for prediction alone: nobody trains.

    Args:
        datamodule: any LightningDataModule.
    """

    def __init__(self, datamodule: LightningDataModule) -> None:
        super().__init__(datamodule, [])
        # A federation has clients.
        self.set_clients({"predict": [0]})

    def setup(self, stage: str) -> None:
        """Set up the wrapped data module."""
        self._wrapped.setup(stage)


def _batch_size(loader: DataLoader[Any]) -> int:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        raise ConfigurationError(
            f"The batch size of a DataLoader with a `{type(loader.batch_sampler).__name__}` is unknown.",
            "Give the DataLoader a `batch_size`, or the sampler an attribute `batch_size`.",
        )
    return int(size)
