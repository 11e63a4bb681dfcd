"""Datasets of validation, test and prediction, batch by batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from lightning_feddua.data.client_data import ClientData, Collate, limited
from lightning_feddua.data.loader_parts import reseed
from lightning_feddua.data.streams import ClientStream, is_stream, read_client
from lightning_feddua.errors import ConfigurationError

Stage = Literal["validation", "test", "predict"]
_END = object()


@dataclass(frozen=True)
class EvaluationSet:
    """One dataset: samples that can be indexed, of which ranks read different batches, or a loader read as a whole.

    Args:
        data: the samples; None for a loader.
        batch_size: the size of their batches.
        drop_last: whether a last batch that is smaller is left out.
        loader: gives the batches, where there are no samples to index.
        most: at most so many batches are read; None for all.
    """

    data: ClientData | None
    batch_size: int = 1
    drop_last: bool = False
    loader: Iterable[Any] | None = None
    most: int | None = None

    @property
    def count(self) -> int | None:
        """The number of batches; None for a loader, which may not know."""
        if self.data is None:
            return None
        count = len(self.data) // self.batch_size if self.drop_last else -(-len(self.data) // self.batch_size)
        return count if self.most is None else min(count, self.most)

    def limited(self, limit: int | float | None, most: int | None = None) -> EvaluationSet:
        """The same with fewer batches.

        Args:
            limit: how many, or which fraction of them if a float; None for all.
            most: at most so many of these; None for all.
        """
        if limit is not None:
            batches = self.count if self.data is not None else _length(self.loader, limit)
            # At least one, unless there is to be no validation.
            limit = max(limited(batches or 0, limit), 1) if limit else 0
        counts = [count for count in (limit, most) if count is not None]
        return replace(self, most=min(counts)) if counts else self

    def read(self, wanted: Callable[[int], bool], seed: Callable[[int], None]) -> Iterator[tuple[int, Any]]:
        """Batches with their numbers.

        Args:
            wanted: tells which batches to read; those of a loader are read in any case, and passed over.
            seed: called with the number of a batch before it is read.
        """
        if self.data is None:
            assert self.loader is not None
            # A number that no batch has.
            seed(1 << 40)
            reseed(self.loader)
            batches = iter(self.loader)
            for index in count() if self.most is None else range(self.most):
                seed(index)
                if (batch := next(batches, _END)) is _END:
                    return
                if wanted(index):
                    yield index, batch
        else:
            for index in filter(wanted, range(self.count or 0)):
                seed(index)
                start = index * self.batch_size
                yield index, self.data.batch(np.arange(start, min(start + self.batch_size, len(self.data))))


def _length(loader: Any, limit: int | float) -> int:
    """The number of a loader's batches; one that does not know it may be limited to a number of them."""
    try:
        return len(loader)
    except TypeError:
        if isinstance(limit, float) and limit < 1:
            raise ConfigurationError(
                f"A fraction of {limit} of a loader without a length is not known.", "Give a number of batches."
            ) from None
        return sys.maxsize if isinstance(limit, float) else int(limit)


def set_of_client(data: ClientData, batch_size: int) -> EvaluationSet:
    """A client's data, for validation per client."""
    if isinstance(data, ClientStream):
        return EvaluationSet(None, loader=data.loader)
    return EvaluationSet(data, batch_size)


def sets_of(data: Any, batch_size: int, collate_fn: Collate | None) -> list[EvaluationSet]:
    """What a user gives as validation, test or prediction data: nothing, one dataset or loader, or several."""
    return [
        set_of_loader(one)
        if isinstance(one, DataLoader)
        else set_of_client(read_client(one, batch_size, collate_fn), batch_size)
        for one in several(data)
    ]


def several(data: Any) -> list[Any]:
    """Datasets or loaders, one by one; a list of samples is one dataset."""
    if data is None:
        return []
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list | tuple) and all(isinstance(one, Dataset | DataLoader) for one in data):
        return list(data)
    return [data]


def set_of_loader(loader: Any) -> EvaluationSet:
    """The batches of a loader written for Trainer: by index where it has none but the usual samplers."""
    if not isinstance(loader, DataLoader):
        if not isinstance(loader, Iterable):
            raise ConfigurationError(
                f"A `{type(loader).__name__}` gives no batches.", "Give a DataLoader, or another iterable of batches."
            )
        return EvaluationSet(None, loader=loader)
    sampler = loader.batch_sampler
    if is_stream(loader.dataset) or type(sampler) is not BatchSampler or not draws_every_row_once(loader):
        return EvaluationSet(None, loader=loader)
    size, drop_last = loader.batch_size or sampler.batch_size, loader.drop_last or sampler.drop_last
    if drop_last and type(sampler.sampler) is RandomSampler:
        # Which rows are left out is the loader's to say.
        return EvaluationSet(None, loader=loader)
    return EvaluationSet(ClientData(loader.dataset, own_collate(loader)), size, drop_last)


def draws_every_row_once(loader: DataLoader[Any]) -> bool:
    """Whether a loader has none but the usual samplers, in place of which the loop can draw the rows itself."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return type(sampler) in (SequentialSampler, DistributedSampler) or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


def own_collate(loader: DataLoader[Any]) -> Collate | None:
    """A loader's collation; None for the default."""
    return None if loader.collate_fn is default_collate else loader.collate_fn


def check_limit(sets: Sequence[EvaluationSet], limit: int | float | None) -> None:
    """One clear error for a fraction of the validation batches that is less than one, as under Trainer."""
    for one in sets:
        if limit and one.count and not limited(one.count, limit):
            raise ConfigurationError(
                f"`limit_val_batches={limit}` of {one.count} batches is less than one.",
                "Give a larger fraction, a number of batches, or 0 for no validation.",
            )
