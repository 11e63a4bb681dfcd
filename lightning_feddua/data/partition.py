"""Which rows of one dataset belong to which client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

from lightning_feddua.errors import ConfigurationError


class Partition(Mapping[str, Dataset[Any]]):
    """Clients that are subsets of one dataset, created on access.

    It stores one array of rows, sorted by client, and where each client's rows start. Its memory depends on the number
    of rows, and hardly on the number of clients.

    Args:
        dataset: a map-style dataset.
        ids: the names of the clients.
        rows: the rows of the first client, then those of the second, and so on.
        sizes: the number of rows of each client.

    Attributes:
        labels: the label of each row of the dataset; None where they are not known.
    """

    def __init__(
        self, dataset: Dataset[Any], ids: Sequence[str] | np.ndarray, rows: np.ndarray, sizes: np.ndarray
    ) -> None:
        self.dataset = dataset
        self.labels: np.ndarray | None = None
        self.ids: Any = ids
        self.sizes = np.asarray(sizes)
        self._rows = rows
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self._index: dict[str, int] | None = None

    @classmethod
    def from_indices(
        cls, dataset: Dataset[Any], indices: Sequence[Sequence[int] | np.ndarray] | np.ndarray | Mapping[str, Any]
    ) -> Partition:
        """Clients with the given rows. No row may belong to two clients.

        Args:
            dataset: a map-style dataset.
            indices: a list of index arrays, or a mapping from client names to index arrays.
        """
        if isinstance(indices, Mapping):
            ids, arrays = [str(name) for name in indices], list(indices.values())
        else:
            ids, arrays = [str(i) for i in range(len(indices))], list(indices)
        arrays = [np.asarray(array) for array in arrays]
        for name, array in zip(ids, arrays, strict=True):
            check_whole_rows(name, array)
        if any(array.ndim != 1 for array in arrays):
            raise ConfigurationError(
                "The partition is not a list of index arrays, one for each client.", "Give each client its own array."
            )
        rows = np.concatenate(arrays).astype(np.int64) if arrays else np.empty(0, np.int64)
        sizes = np.array([len(array) for array in arrays], dtype=np.int64)
        partition = cls(dataset, ids, rows, sizes)
        partition._check()
        return partition

    @classmethod
    def from_sizes(cls, dataset: Dataset[Any], ids: Sequence[str], sizes: Sequence[int]) -> Partition:
        """Clients whose rows follow one another in the dataset.

        Args:
            dataset: a map-style dataset.
            ids: the names of the clients.
            sizes: the number of rows of each client.
        """
        return cls(dataset, ids, np.arange(sum(sizes)), np.array(sizes))

    @classmethod
    def from_values(cls, dataset: Dataset[Any], values: Any, min_samples: int = 1) -> Partition:
        """One client for each distinct value, such as the name of a writer, in order of first appearance.

        Args:
            dataset: a map-style dataset.
            values: the value of each row: an array or an Arrow column.
            min_samples: drop clients with fewer rows.
        """
        names, rows, sizes = rows_by_value(values)
        keep = sizes >= min_samples
        if not keep.any():
            raise ConfigurationError(
                f"No client has {min_samples} samples: the largest has {sizes.max(initial=0)}.",
                "Choose a smaller `min_samples`.",
            )
        if not keep.all():
            rows = rows[np.repeat(keep, sizes)]
            names, sizes = names[keep], sizes[keep]
        return cls(dataset, names, rows, sizes)

    def _check(self) -> None:
        names = Counter(self.ids)
        if len(names) < len(self.ids):
            name, count = names.most_common(1)[0]
            raise ConfigurationError(f"{count} clients have the name `{name}`.", "Give each client its own name.")
        for name, size in zip(self.ids, self.sizes, strict=True):
            if size == 0:
                raise ConfigurationError(
                    f"The partition leaves client `{name}` empty.", "Use fewer clients, or a less skewed partition."
                )
        size = len(self.dataset)  # type: ignore[arg-type]
        outside = self._rows[(self._rows < 0) | (self._rows >= size)]
        if len(outside):
            raise ConfigurationError(
                f"The partition has the index {outside[0]}, and the dataset has {size} rows.",
                "Give indices from 0 to the number of rows minus 1.",
            )
        counts = np.bincount(self._rows, minlength=size)
        if len(counts) and counts.max() > 1:
            row = int(counts.argmax())
            owners = [name for name, array in self.items_by_rows() if row in array]
            raise ConfigurationError(
                f"The partition gives row {row} {counts[row]} times: to {', '.join(f'`{o}`' for o in owners[:3])}.",
                "Give each row at most once, to one client.",
            )

    def items_by_rows(self) -> Iterator[tuple[str, np.ndarray]]:
        """The name and the rows of each client."""
        for i, name in enumerate(self.ids):
            yield str(name), self.rows(i)

    @property
    def all_rows(self) -> np.ndarray:
        """The rows of the first client, then those of the second, and so on."""
        return self._rows

    def rows(self, index: int) -> np.ndarray:
        """The rows of the client at an index."""
        return self._rows[self._starts[index] : self._starts[index + 1]]

    def at(self, index: int) -> Dataset[Any]:
        """The dataset of the client at an index."""
        return Subset(self.dataset, self.rows(index))  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> Dataset[Any]:
        if self._index is None:
            self._index = {str(known): i for i, known in enumerate(self.ids)}
        return self.at(self._index[name])

    def __iter__(self) -> Iterator[str]:
        return map(str, self.ids)

    def __len__(self) -> int:
        return len(self.ids)


def check_whole_rows(client: str, rows: np.ndarray) -> None:
    """One clear error for rows of a client that are not whole numbers, such as a mask."""
    if rows.size and rows.dtype.kind not in "iu":
        raise ConfigurationError(
            f"The indices of client `{client}` are `{rows.dtype}`.",
            "Give whole numbers; for a mask, `np.flatnonzero(mask)`.",
        )


def rows_by_value(values: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group rows by their value.

    Args:
        values: the value of each row: an array or an Arrow column.

    Returns:
        The distinct values as strings in order of first appearance, the rows of the first value, then those of the
        second, and so on, and the number of rows of each value.
    """
    import pyarrow as pa

    column = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(np.asarray(values))
    if column.null_count:
        raise ConfigurationError(
            f"{column.null_count} rows do not name their client.", "Fill in the missing values, or drop these rows."
        )
    encoded = column.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    names = np.asarray(encoded.dictionary.to_pylist(), dtype=str)
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    return names, np.argsort(codes, kind="stable"), np.bincount(codes, minlength=len(names))
