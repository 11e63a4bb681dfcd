"""One dataset split into clients, by index arrays or by a partitioner and the labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_feddua.data.partition import Partition
from lightning_feddua.data.partitioners import Partitioner
from lightning_feddua.errors import ConfigurationError

# The rows of each client: index arrays, a mapping from client names to index arrays, or a partitioner.
PartitionLike = Sequence[Sequence[int] | np.ndarray] | np.ndarray | Mapping[str, Any] | Partitioner


def make_partition(dataset: Dataset[Any], partition: PartitionLike, labels: np.ndarray | None = None) -> Partition:
    """The clients of a dataset.

    Args:
        dataset: a map-style dataset.
        partition: index arrays, a mapping from client names to index arrays, or a partitioner.
        labels: the label of each row. If None, a partitioner gets those that :func:`labels_of` finds, and one that
            needs none gets zeros where there are none.
    """
    if isinstance(partition, str) or not isinstance(partition, Partitioner | Mapping | Sequence | np.ndarray):
        raise ConfigurationError(
            f"The partition is `{partition!r:.100}`.", "Give index arrays, one for each client, or a partitioner."
        )
    rows = len(dataset)  # type: ignore[arg-type]
    if labels is None and isinstance(partition, Partitioner):
        labels = labels_of(dataset) if partition.needs_labels else _labels_if_any(dataset)
    if labels is not None:
        labels = np.asarray(labels)
        if labels.shape != (rows,):
            raise ConfigurationError(
                f"The labels have the shape {labels.shape}, and the dataset has {rows} rows.",
                "Give one label for each row.",
            )
    if isinstance(partition, Partitioner):
        partition = partition.partition(np.zeros(rows, dtype=np.int64) if labels is None else labels)
    clients = Partition.from_indices(dataset, partition)
    clients.labels = labels
    return clients


def _labels_if_any(dataset: Dataset[Any]) -> np.ndarray | None:
    """One label for each row, as far as the dataset has them."""
    try:
        labels = labels_of(dataset)
    except (ConfigurationError, ValueError, TypeError):
        return None
    return labels if labels.shape == (len(dataset),) else None  # type: ignore[arg-type]


def labels_of(dataset: Dataset[Any]) -> np.ndarray:
    """The labels of a dataset that has them as ``targets``, as ``labels`` or as its last tensor."""
    if isinstance(dataset, Subset):
        return labels_of(dataset.dataset)[np.asarray(dataset.indices)]
    labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if labels is None and isinstance(dataset, TensorDataset):
        last = dataset.tensors[-1]
        labels = last if last.dim() == 1 and not last.is_floating_point() else None
    if labels is None:
        raise ConfigurationError(
            f"No labels can be found in a dataset of type `{type(dataset).__name__}`: it has no `targets`, no `labels`,"
            " no last tensor of integers.",
            "Use data with classes, or pass `labels`, or the `label_column` of a Hugging Face dataset.",
        )
    return labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
