"""The DataLoaders that Trainer would have in a client's fit, made when a module asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning import LightningModule
from torch.utils.data import DataLoader, IterableDataset

from lightning_feddua.data.client_data import ClientData
from lightning_feddua.data.evaluation_data import EvaluationSet, Stage
from lightning_feddua.lightning_names import is_overridden


class TrainerLoaders:
    """``trainer.train_dataloader`` and its like, and how many batches they have."""

    lightning_module: LightningModule
    state: Any
    in_client: bool
    # As under Trainer, whole numbers are batches and fractions are parts of the data.
    limit_train_batches: int | float = 1.0
    limit_val_batches: int | float = 1.0
    limit_test_batches: int | float = 1.0
    limit_predict_batches: int | float = 1.0
    num_sanity_val_steps: int | float = 2

    def __init__(self) -> None:
        # The samples of the client in training, and how they are batched.
        self.client_data: ClientData | None = None
        self.batch_size = 1
        self.drop_last = False
        # The datasets of a stage.
        self.evaluation_data: Callable[[Stage], list[EvaluationSet]] = lambda stage: []
        self._train_loader: tuple[ClientData, DataLoader[Any]] | None = None
        self._loaders: dict[str, Any] = {}

    @property
    def train_dataloader(self) -> DataLoader[Any] | None:
        """A loader of the samples of the client in training; None outside of clients."""
        if not self.in_client:
            return None
        data = self.client_data
        if data is None:
            raise TypeError("its training step asks for `self.trainer.train_dataloader`, which differs between clients")
        if self._train_loader is None or self._train_loader[0] is not data:
            shuffle = not isinstance(data.dataset, IterableDataset)
            self._train_loader = data, _loader(data, self.batch_size, shuffle=shuffle, drop_last=self.drop_last)
        return self._train_loader[1]

    @property
    def val_dataloaders(self) -> Any:
        """The loader of the validation data, or a list of them; None without any, and in a test."""
        return self._evaluation_loaders("validation") if self.state.fn in ("fit", "validate") else None

    @property
    def test_dataloaders(self) -> Any:
        """The loader of the test data, or a list of them; None outside of a test."""
        return self._evaluation_loaders("test") if self.state.fn == "test" else None

    @property
    def predict_dataloaders(self) -> Any:
        """The loader of the data to predict, or a list of them; None outside of a prediction."""
        return self._evaluation_loaders("predict") if self.state.fn == "predict" else None

    @property
    def num_val_batches(self) -> list[int]:
        """The number of batches of each loader for validation."""
        return _counts(self.val_dataloaders, self.limit_val_batches)

    @property
    def num_sanity_val_batches(self) -> list[int]:
        """The number of batches of each loader in the sanity check."""
        return [int(min(self.num_sanity_val_steps, batches)) for batches in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[int]:
        """The number of batches of each loader for the test."""
        return _counts(self.test_dataloaders, self.limit_test_batches)

    @property
    def num_predict_batches(self) -> list[int]:
        """The number of batches of each loader for prediction."""
        return _counts(self.predict_dataloaders, self.limit_predict_batches)

    @property
    def enable_validation(self) -> bool:
        """Whether there is something to validate with."""
        has_step = is_overridden("validation_step", self.lightning_module)
        return has_step and self.limit_val_batches > 0 and bool(self.evaluation_data("validation"))

    def _evaluation_loaders(self, stage: Stage) -> Any:
        if stage not in self._loaders:
            loaders = [_loader_of(one) for one in self.evaluation_data(stage)]
            self._loaders[stage] = loaders if len(loaders) > 1 else next(iter(loaders), None)
        return self._loaders[stage]


def _loader_of(one: EvaluationSet) -> Any:
    return one.loader if one.data is None else _loader(one.data, one.batch_size, drop_last=one.drop_last)


def _loader(data: ClientData, batch_size: int, shuffle: bool = False, drop_last: bool = False) -> DataLoader[Any]:
    return DataLoader(data.dataset, batch_size, shuffle=shuffle, collate_fn=data.collate_fn, drop_last=drop_last)


def _counts(loaders: Any, limit: int | float) -> list[int]:
    """How many batches of each loader are used, as Trainer counts them."""
    if loaders is None:
        return []
    lengths = [len(loader) for loader in (loaders if isinstance(loaders, list) else [loaders])]
    return [min(length, limit) if isinstance(limit, int) else int(length * limit) for length in lengths]
