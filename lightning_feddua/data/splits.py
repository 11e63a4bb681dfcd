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
        labels: the label of each row. If None, a partitioner gets those that :func:`labels_of` finds.
    """
    if isinstance(partition, str) or not isinstance(partition, Partitioner | Mapping | Sequence | np.ndarray):
        raise ConfigurationError(
            f"The partition is `{partition!r:.100}`.", "Give index arrays, one for each client, or a partitioner."
        )
    if labels is None and isinstance(partition, Partitioner):
        labels = labels_of(dataset)
    if labels is not None:
        labels = np.asarray(labels)
        rows = len(dataset)  # type: ignore[arg-type]
        if labels.shape != (rows,):
            raise ConfigurationError(
                f"The labels have the shape {labels.shape}, and the dataset has {rows} rows.",
                "Give one label for each row.",
            )
    if isinstance(partition, Partitioner):
        assert labels is not None
        partition = partition.partition(labels)
    clients = Partition.from_indices(dataset, partition)
    clients.labels = labels
    return clients


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
            f"A `{type(dataset).__name__}` shows no labels: no `targets`, no `labels`, no last tensor of integers.",
            "Use data with classes, or pass the labels as `labels` or `label_column`.",
        )
    return labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
