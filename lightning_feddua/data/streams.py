"""Batches that a DataLoader draws by its own means: own samplers, own batches, streams without a length."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

from lightning_feddua.data.client_data import ClientData, Collate
from lightning_feddua.data.loader_parts import parts_of, reseed, set_epoch
from lightning_feddua.data.partition import Partition
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.randomness import Purpose, preserved_random_state, random_state, seed_generators, set_random_state

# The size of a client whose samples cannot be counted.
UNKNOWN_SIZE = -1
# Stands for the endless number of batches of such a client.
ENDLESS = 1 << 31
_CPU = torch.device("cpu")


class ClientStream(ClientData):
    """A client that is a DataLoader, or a stream that one reads. Its batches are used as they come.

    What the loader, its samplers and its dataset draw at random, from the global generators or from generators of their
    own, follows from the run's seed, the round and the client.

    Args:
        loader: the DataLoader.
        batch_size: the data module's, by which others turn sizes into numbers of batches.
    """

    def __init__(self, loader: DataLoader[Any], batch_size: int) -> None:
        self.loader = loader
        self._batch_size = batch_size
        self._tensors = None

    def __len__(self) -> int:
        """As many samples as give the right number of batches of the data module's size."""
        return _counted_size(self.loader, self._batch_size)

    @property
    def samples(self) -> int:
        """The number of samples; :data:`UNKNOWN_SIZE` if it cannot be counted."""
        return stream_size(self.loader)

    def batch(self, positions: np.ndarray) -> Any:
        """Not possible: the loader decides what is in a batch."""
        raise ConfigurationError(
            "The samples of a client that is a DataLoader or a stream cannot be indexed.",
            "Give the client a map-style dataset.",
        )

    def batches(
        self,
        seed: int,
        round: int,
        client: int,
        steps: int | None = None,
        epochs: int | None = None,
        length: int | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """A client's batches in a round, each with the number of the pass over the loader that it belongs to.

        Args:
            seed: the run's seed.
            round: the round.
            client: the index of the client in the data module.
            steps: the number of batches; None to use ``epochs``.
            epochs: the number of passes.
            length: the largest number of batches in a pass; None for all.
        """
        own = _Generators()
        with own.used():
            seed_generators(seed, round, client << 20, Purpose.DATA, _CPU)
            reseed(self.loader)
        left = steps
        for epoch in range(epochs) if steps is None and epochs is not None else count():
            with own.used():
                set_epoch(self.loader, round * (epochs or 1) + epoch)
                batches = iter(self.loader)
            empty, place = True, 0
            while (left is None or left > 0) and (length is None or place < length):
                with own.used():
                    try:
                        batch = next(batches)
                    except StopIteration:
                        break
                empty, place = False, place + 1
                left = None if left is None else left - 1
                yield epoch, batch
            if left == 0:
                return
            if empty:
                raise ValueError(
                    f"its `{type(self.loader.dataset).__name__}` gave no batch in pass {epoch} of the round."
                    " Let `__iter__` start anew each time"
                )


class WeightedPartition(Partition):
    """Clients of one dataset that draw their samples by weight, as a ``WeightedRandomSampler`` does over all of it.

    Args:
        clients: the rows of each client.
        loader: a DataLoader over the whole dataset with such a sampler.
    """

    def __init__(self, clients: Partition, loader: DataLoader[Any]) -> None:
        super().__init__(clients.dataset, clients.ids, clients.all_rows, clients.sizes)
        self.labels = clients.labels
        self._loader = loader

    def at(self, index: int) -> Any:
        """A DataLoader over the client's rows, with their weights and their share of the draws."""
        loader, rows = self._loader, self.rows(index)
        sampler = loader.sampler
        assert isinstance(sampler, WeightedRandomSampler)
        weights = torch.as_tensor(sampler.weights)[torch.from_numpy(rows)]
        draws = max(1, round(sampler.num_samples * len(rows) / len(self.dataset)))  # type: ignore[arg-type]
        return DataLoader(
            super().at(index),
            loader.batch_size,
            sampler=WeightedRandomSampler(weights.tolist(), draws, sampler.replacement),
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
        )


class _Generators:
    """A state of Python's, NumPy's and torch's global generators beside that of the local steps."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any, Any] | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draw from this state, and then from the other again."""
        with preserved_random_state(_CPU):
            if self._states is not None:
                python, numpy, torch_states = self._states
                random.setstate(python)
                np.random.set_state(numpy)
                set_random_state(_CPU, torch_states)
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state(), random_state(_CPU)


def is_stream(dataset: Any) -> bool:
    """Whether batches come from a loader: the dataset is a DataLoader, or has to be read by one in its own order."""
    return isinstance(dataset, DataLoader | IterableDataset)


def read_client(dataset: Any, batch_size: int, collate_fn: Collate | None = None) -> ClientData:
    """A client's data: samples that can be indexed, or the batches of a loader.

    Args:
        dataset: a map-style dataset, an ``IterableDataset`` or a DataLoader.
        batch_size: the size of a minibatch, unless a DataLoader says otherwise.
        collate_fn: likewise.
    """
    if isinstance(dataset, IterableDataset):
        dataset = DataLoader(dataset, batch_size, collate_fn=collate_fn)
    return ClientStream(dataset, batch_size) if isinstance(dataset, DataLoader) else ClientData(dataset, collate_fn)


def is_map_style(dataset: Any) -> bool:
    """Whether a dataset has a length and can be indexed."""
    # An IterableDataset inherits a `__getitem__` that it does not have.
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not is_stream(dataset)


def dataset_size(name: str, dataset: Any) -> int:
    """The number of samples of a client's dataset, -1 if unknown; one clear error if it cannot be read."""
    if is_stream(dataset):
        if isinstance(dataset, DataLoader):
            check_client_loader(name, dataset)
        return stream_size(dataset)
    if not is_map_style(dataset):
        raise ConfigurationError(
            f"The dataset of client `{name}` is a `{type(dataset).__name__}`, which cannot be indexed.",
            "Give each client a map-style dataset, with `__len__` and `__getitem__`, an `IterableDataset`, or a"
            " DataLoader.",
        )
    return len(dataset)


def stream_size(stream: DataLoader[Any] | Dataset[Any]) -> int:
    """The number of samples of a loader's dataset, or of a stream; :data:`UNKNOWN_SIZE` if it does not tell."""
    dataset = stream.dataset if isinstance(stream, DataLoader) else stream
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return UNKNOWN_SIZE


def work_sizes(clients: Mapping[str, Any], sizes: Callable[[], np.ndarray], batch_size: int) -> np.ndarray:
    """The lengths of all clients' :class:`ClientData`, from which follows how much each has to do.

    Those of DataLoaders and streams are not their numbers of samples. A client whose dataset cannot be made has 0.

    Args:
        clients: their datasets by name.
        sizes: gives their numbers of samples.
        batch_size: the data module's.
    """
    # Of clients that know their sizes, which may be many, no more are made than has to be.
    if hasattr(clients, "sizes") and not is_stream(clients[next(iter(clients))]):
        return sizes()

    def of(name: str) -> int:
        try:
            dataset = clients[name]
            return _counted_size(dataset, batch_size) if is_stream(dataset) else dataset_size(name, dataset)
        except Exception:
            return 0

    return np.fromiter(map(of, clients), dtype=np.int64)


def _counted_size(stream: DataLoader[Any] | IterableDataset[Any], batch_size: int) -> int:
    """As many samples as give the right number of batches of a size."""
    if isinstance(stream, IterableDataset):
        stream = DataLoader(stream, batch_size)
    batches = batch_count(stream)
    return (ENDLESS if batches is None else batches) * batch_size


def batch_count(loader: Any) -> int | None:
    """The number of batches of a loader; None if it does not tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def check_client_loader(name: str, loader: DataLoader[Any]) -> None:
    """One clear error for a client whose loader would skip rows depending on the number of ranks."""
    if any(isinstance(part, DistributedSampler) for part in parts_of(loader)):
        raise ConfigurationError(
            f"The DataLoader of client `{name}` has a `DistributedSampler`, which leaves out the rows of other ranks.",
            "Remove it: the loop deals whole clients to ranks.",
        )
