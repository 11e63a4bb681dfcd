"""Minibatches of a client's samples, indexed directly if they are tensors."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from lightning_feddua._private import tree_leaves, version_of

Collate = Callable[[list[Any]], Any]


class ClientData:
    """Minibatches of one dataset, without a DataLoader.

    The tensors of a ``TensorDataset``, or of a ``Subset`` of one, are indexed directly. The samples of any other
    map-style dataset are passed to ``collate_fn``. In both cases a batch has the form that a DataLoader would give it.

    Args:
        dataset: a map-style dataset.
        collate_fn: turns a list of samples into a batch.
    """

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate | None = None) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn
        self._dataset, self._places = _unwrap_subsets(dataset)
        self._tensors = None
        # A subclass may change samples in `__getitem__`.
        if type(self._dataset) is TensorDataset and collate_fn is None:
            self._tensors = self._dataset.tensors
        self._collate = collate_fn or default_collate

    def __len__(self) -> int:
        return len(self._dataset) if self._places is None else len(self._places)  # type: ignore[arg-type]

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self)

    @property
    def in_memory(self) -> bool:
        """Whether the samples are tensors in memory, so that every access gives the same values."""
        return self._tensors is not None

    def batch(self, positions: np.ndarray) -> Any:
        """The batch of the samples at some positions. Its tensors are copies, so a training step may modify them."""
        if self._tensors is not None and self._places is None and len(positions) == len(self):
            # For all samples, a plain copy is several times faster than gathering rows.
            return [tensor.clone() for tensor in self._tensors]
        index = positions if self._places is None else self._places[positions]
        if self._tensors is not None:
            rows = torch.from_numpy(index)
            return [_taken(tensor, rows) for tensor in self._tensors]
        getitems = getattr(self._dataset, "__getitems__", None)
        samples = getitems(index.tolist()) if getitems else [self._dataset[i] for i in index.tolist()]
        return self._collate(samples)


def stacked_batch(clients: Sequence[ClientData], positions: Sequence[np.ndarray]) -> list[Tensor] | None:
    """The batches of several clients, stacked along a first axis; None if the clients do not share their tensors.

    Args:
        clients: the clients.
        positions: the positions of each client's samples, equally many per client.
    """
    tensors = clients[0]._tensors
    if tensors is None or any(client._tensors is not tensors for client in clients):
        return None
    rows = [p if c._places is None else c._places[p] for c, p in zip(clients, positions, strict=True)]
    index = torch.from_numpy(np.concatenate(rows))
    return [_taken(tensor, index).unflatten(0, (len(rows), -1)) for tensor in tensors]


class ReusableBatch:
    """A batch that several steps can share as long as none of them modifies it.

    Args:
        batch: the batch.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        self._versions = [version_of(tensor) for tensor in self._tensors]

    @property
    def untouched(self) -> bool:
        """Whether its tensors are unmodified."""
        return [version_of(tensor) for tensor in self._tensors] == self._versions


def limited(batches: int, limit: int | float | None) -> int:
    """How many of some minibatches are used, as Trainer counts them.

    Args:
        batches: how many there are.
        limit: at most so many, or this fraction of them if a float; None for all.

    >>> limited(10, 3), limited(10, 0.35), limited(10, 1), limited(10, 1.0), limited(10, 12.0), limited(10, None)
    (3, 3, 1, 10, 10, 10)
    """
    if limit is None:
        return batches
    return int(batches * limit) if isinstance(limit, float) and limit <= 1 else min(batches, int(limit))


def minibatches(
    size: int,
    batch_size: int,
    rng: np.random.Generator,
    steps: int | None = None,
    epochs: int | None = None,
    length: int | None = None,
) -> Iterator[tuple[int, np.ndarray]]:
    """The positions of the samples in a client's minibatches, reshuffled in each pass.

    With ``steps``, there are exactly that many minibatches of ``min(batch_size, size)`` samples, taken from an endless
    stream of shuffled passes: a minibatch may contain the end of one pass and the start of the next. With ``epochs``,
    there are whole passes as with a DataLoader: the last minibatch of a pass may be smaller. A client that fits into
    one minibatch uses all its samples, in order, in each step.

    Args:
        size: the number of samples.
        batch_size: the size of a minibatch.
        rng: the generator of the shuffles.
        steps: the number of minibatches; None to use ``epochs``.
        epochs: the number of passes.
        length: the number of minibatches in a pass, of which there are only the first; None for all.

    Yields:
        The number of the pass and the positions of each minibatch.
    """
    if size <= batch_size:
        for step in range(steps if steps is not None else epochs or 0):
            yield step, np.arange(size)
    elif steps is not None:
        stream = np.concatenate([rng.permutation(size) for _ in range(-(-steps * batch_size // size))])
        for step in range(steps):
            yield step * batch_size // size, stream[step * batch_size : (step + 1) * batch_size]
    else:
        for epoch in range(epochs or 0):
            order = rng.permutation(size)
            for start in range(0, size, batch_size)[:length]:
                yield epoch, order[start : start + batch_size]


def _taken(tensor: Tensor, rows: Tensor) -> Tensor:
    """Copies of some rows. `index_select` is several times faster, but makes any memory format the plain one."""
    rows = rows.to(tensor.device)
    return tensor.index_select(0, rows) if tensor.is_contiguous() else tensor[rows]


def _unwrap_subsets(dataset: Dataset[Any]) -> tuple[Dataset[Any], np.ndarray | None]:
    indices: np.ndarray | None = None
    while type(dataset) is Subset:
        outer = _as_indices(dataset.indices)
        indices = outer if indices is None else outer[indices]
        dataset = dataset.dataset
    return dataset, indices


def _as_indices(indices: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
    return np.asarray(indices, dtype=np.int64)
