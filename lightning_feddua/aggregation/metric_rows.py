"""Named numbers, a row for each client or batch, exchanged between ranks exactly and without agreeing on names."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_feddua.aggregation.collectives import all_reduce_sum, gather_objects
from lightning_feddua.vectors import scalar_dtype

# What one row holds: name -> (value, weight of this row in the mean of the name).
Row = Mapping[str, tuple[Tensor, float]]


class Table:
    """Rows of named, weighted numbers that travel in a window of an all-reduced buffer.

    A row is written by one rank and is zero on the others, so that the sum over ranks is the row itself, to the last
    bit: numbers are split into parts of the buffer's dtype without loss of precision or range. Means are taken in row
    order. What is computed from a table therefore does not depend on how many ranks there are.

    Names that nobody has used before raise a flag in the table; all ranks then exchange the rows by name once, and have
    columns for them from the next time on.

    Args:
        fabric: for the exchange of new names.
        names: columns to have from the start.
    """

    def __init__(self, fabric: Fabric, names: Iterable[str] = ()) -> None:
        self._fabric = fabric
        self._names = sorted(names)
        self._rows: dict[int, Row] = {}

    def size(self, rows: int, dtype: torch.dtype) -> int:
        """How many elements of a buffer the table takes."""
        return rows * self._width * packed_size(dtype)

    @property
    def _width(self) -> int:
        return 1 + 2 * len(self._names)

    def start(self) -> None:
        """Forget all rows."""
        self._rows = {}

    def add(self, index: int, row: Row) -> None:
        """Put a row that this rank has computed; scalars stay on their device."""
        self._rows[index] = row

    def write(self, window: Tensor) -> None:
        """Write this rank's rows into their window of the buffer, without a synchronisation for each number."""
        rows = window.numel() // (self._width * packed_size(window.dtype))
        columns = {name: 1 + 2 * i for i, name in enumerate(self._names)}
        host = np.zeros((rows, self._width))
        cells, values = [], []
        for index, row in self._rows.items():
            for name, (value, weight) in row.items():
                if (column := columns.get(name)) is None:
                    host[index, 0] = 1.0
                else:
                    host[index, column + 1] = weight
                    cells.append(index * self._width + column)
                    values.append(value)
        dtype = scalar_dtype(window.device)
        numbers = torch.from_numpy(host).to(window.device, dtype)
        if values:
            numbers.view(-1)[torch.tensor(cells, device=window.device)] = torch.stack(
                [value.to(window.device, dtype) for value in values]
            )
        window.copy_(pack(numbers, window.dtype).view(-1))

    def read(self, window: Tensor) -> "Columns":
        """All rows, once the buffer has been reduced. A collective where a new name turned up."""
        parts = packed_size(window.dtype)
        numbers = unpack(window.view(-1, self._width, parts)).cpu().numpy()
        if not (numbers[:, 0] > 0).any():
            return {name: (numbers[:, 1 + 2 * i], numbers[:, 2 + 2 * i]) for i, name in enumerate(self._names)}
        return self._learn(len(numbers))

    def _learn(self, count: int) -> "Columns":
        own = {i: {name: (v.item(), w) for name, (v, w) in row.items()} for i, row in self._rows.items()}
        rows = {i: row for part in gather_objects(self._fabric, own) for i, row in part.items()}
        self._names = sorted({*self._names, *(name for row in rows.values() for name in row)})
        columns = {name: (np.zeros(count), np.zeros(count)) for name in self._names}
        for i, row in rows.items():
            for name, (value, weight) in row.items():
                columns[name][0][i], columns[name][1][i] = value, weight
        return columns


# name -> (values, weights) of all rows; weight 0 where a row does not have the name.
Columns = dict[str, tuple[np.ndarray, np.ndarray]]


def means(columns: Columns, dtype: type[np.floating[Any]] = np.float64) -> dict[str, float]:
    """The weighted mean of each column that any row has, summed row by row in a dtype."""
    result = {}
    for name, (values, weights) in columns.items():
        present = weights > 0
        if present.any():
            terms = values[present].astype(dtype) * weights[present].astype(dtype)
            # `cumsum` adds strictly one by one, as Trainer does; `sum` would not.
            result[name] = float(terms.cumsum(dtype=dtype)[-1] / weights[present].sum().astype(dtype))
    return result


def exchange(fabric: Fabric, table: Table, rows: Mapping[int, Row], count: int) -> Columns:
    """Give every rank all rows of which each has computed some; a collective."""
    table.start()
    for index, row in rows.items():
        table.add(index, row)
    dtype = scalar_dtype(fabric.device)
    window = torch.zeros(table.size(count, dtype), dtype=dtype, device=fabric.device)
    table.write(window)
    all_reduce_sum(fabric, window)
    return table.read(window)


def packed_size(dtype: torch.dtype) -> int:
    """How many elements :func:`pack` makes of one number."""
    return 1 if dtype == torch.float64 else 4


def pack(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as a few numbers of a shorter dtype, on a new last axis, without loss of precision or range."""
    values = values.to(scalar_dtype(values.device))
    if packed_size(dtype) == 1:
        return values.unsqueeze(-1)
    mantissa, exponent = torch.frexp(values)
    high = mantissa.to(dtype)
    rest = torch.where(high.isfinite(), mantissa - high, 0.0)
    middle = rest.to(dtype)
    low = (rest - middle).to(dtype)
    return torch.stack([high, middle, low, exponent.to(dtype)], dim=-1)


def unpack(parts: Tensor) -> Tensor:
    """The inverse of :func:`pack`."""
    parts = parts.to(scalar_dtype(parts.device))
    if parts.shape[-1] == 1:
        return parts.squeeze(-1)
    high, middle, low, exponent = parts.unbind(-1)
    # In two halves, because 2^exponent alone may overflow.
    half = torch.floor(exponent / 2)
    return torch.ldexp(torch.ldexp(high + middle + low, half), exponent - half)
