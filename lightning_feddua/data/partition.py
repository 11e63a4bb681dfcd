"""One dataset, many clients: which rows belong to whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

from lightning_feddua.errors import ConfigurationError


class Partition(Mapping[str, Dataset[Any]]):
    """Clients that are subsets of one dataset, made when they are asked for.

    Holds one array of rows, ordered by client, and where each client's rows begin: what it costs depends on the number
    of rows and hardly on the number of clients.

    Args:
        dataset: a map-style dataset.
        ids: the clients' names.
        rows: the rows of the first client, then those of the second, and so on.
        sizes: how many rows each client has.
    """

    def __init__(
        self, dataset: Dataset[Any], ids: Sequence[str] | np.ndarray, rows: np.ndarray, sizes: np.ndarray
    ) -> None:
        self.dataset = dataset
        self.ids: Any = ids
        self.sizes = np.asarray(sizes)
        self._rows = rows
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self._index: dict[str, int] | None = None

    @classmethod
    def from_indices(
        cls, dataset: Dataset[Any], indices: Sequence[Sequence[int] | np.ndarray] | np.ndarray | Mapping[str, Any]
    ) -> Partition:
        """Clients with the given rows, each row in one client at the most.

        Args:
            dataset: a map-style dataset.
            indices: a list of index arrays, or a mapping of them by client name.
        """
        if isinstance(indices, Mapping):
            ids, arrays = [str(name) for name in indices], list(indices.values())
        else:
            ids, arrays = [str(i) for i in range(len(indices))], list(indices)
        arrays = [np.asarray(array) for array in arrays]
        for name, array in zip(ids, arrays, strict=True):
            if array.size and array.dtype.kind not in "iu":
                raise ConfigurationError(
                    f"The indices of client `{name}` are `{array.dtype}`.",
                    "Give whole numbers; of a mask, `np.flatnonzero(mask)`.",
                )
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
    def from_values(cls, dataset: Dataset[Any], values: Any, min_samples: int = 1) -> Partition:
        """A client for each distinct value, such as a writer's or a speaker's name.

        Args:
            dataset: a map-style dataset.
            values: the value of each row: an array or an Arrow column.
            min_samples: leave out clients with fewer rows.
        """
        names, codes = _factorize(values)
        order = np.argsort(codes, kind="stable")
        sizes = np.bincount(codes, minlength=len(names))
        keep = sizes >= min_samples
        if not keep.any():
            raise ConfigurationError(
                f"No client has {min_samples} samples: the largest has {sizes.max(initial=0)}.",
                "Choose a smaller `min_samples`.",
            )
        if not keep.all():
            order = order[np.repeat(keep, sizes)]
            names, sizes = names[keep], sizes[keep]
        return cls(dataset, names, order, sizes)

    def _check(self) -> None:
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
                "Give indices from 0 up to the number of rows.",
            )
        counts = np.bincount(self._rows, minlength=size)
        if len(counts) and counts.max() > 1:
            row = int(counts.argmax())
            owners = [name for name, array in self.items_by_rows() if row in array]
            raise ConfigurationError(
                f"The partition gives row {row} {counts[row]} times: to {', '.join(f'`{o}`' for o in owners[:3])}.",
                "Give each row to one client at the most, once.",
            )

    def items_by_rows(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each client's name and rows."""
        for i, name in enumerate(self.ids):
            yield str(name), self.rows(i)

    def rows(self, index: int) -> np.ndarray:
        """The rows of the client at a place."""
        return self._rows[self._starts[index] : self._starts[index + 1]]

    def at(self, index: int) -> Dataset[Any]:
        """The dataset of the client at a place."""
        return Subset(self.dataset, self.rows(index))  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> Dataset[Any]:
        if self._index is None:
            self._index = {str(known): i for i, known in enumerate(self.ids)}
        return self.at(self._index[name])

    def __iter__(self) -> Iterator[str]:
        return map(str, self.ids)

    def __len__(self) -> int:
        return len(self.ids)


def _factorize(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values as strings, in order of first appearance, and the code of each row."""
    try:
        import pyarrow as pa
    except ImportError:  # pragma: no cover - `datasets` brings it
        names, codes = np.unique(np.asarray(values), return_inverse=True)
        return names.astype(str), codes
    column = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(np.asarray(values))
    if column.null_count:
        raise ConfigurationError(
            f"{column.null_count} rows do not name their client.", "Fill the column, or leave these rows out."
        )
    encoded = column.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    return np.asarray(encoded.dictionary.to_pylist(), dtype=str), encoded.indices.to_numpy(zero_copy_only=False)
