"""Tensors of one shape in a temporary file, which is gone when the process ends, however it ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, MutableMapping

import numpy as np
import torch
from torch import Tensor

from lightning_feddua.errors import ConfigurationError


class DiskRows(MutableMapping[int, Tensor]):
    """A dictionary of tensors in one open file. A place that is given up is used again.

    The file has no name in its folder, so that nothing is left of it after a kill. Rows are written and read as any
    file is: on a full disk, a write into mapped memory would end the process without a word.

    Args:
        shape: of each tensor.
        dtype: of each tensor.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self._bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self._end = 0
        try:
            self._file = tempfile.TemporaryFile(prefix="client_states_", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise _not_written(error) from error

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __getitem__(self, key: int) -> Tensor:
        row = torch.empty(self._shape, dtype=self._dtype)
        content = _bytes_of(row)
        self._file.seek(self._places[key] * self._bytes)
        while content:
            count = self._file.readinto(content)
            if not count:
                raise ConfigurationError(
                    f"What clients keep is no longer whole in `{tempfile.gettempdir()}`.",
                    'Look after the disk, or use `client_states="memory"`.',
                )
            content = content[count:]
        return row

    def __setitem__(self, key: int, row: Tensor) -> None:
        place = self._places.get(key)
        if place is None:
            place = self._free[-1] if self._free else self._end
        content = _bytes_of(row.detach().to("cpu", self._dtype).contiguous())
        try:
            self._file.seek(place * self._bytes)
            while content:
                content = content[self._file.write(content) :]
        except OSError as error:
            raise _not_written(error) from error
        if key not in self._places and place < self._end:
            self._free.pop()
        self._places[key] = place
        self._end = max(self._end, place + 1)

    def __delitem__(self, key: int) -> None:
        self._free.append(self._places.pop(key))

    def mapped(self) -> dict[int, Tensor]:
        """All tensors, to be read only and before the next change; none of them takes memory of this process."""
        if not self._places or not self._bytes:
            return dict(self)
        content = np.memmap(self._file, dtype=np.uint8, mode="c", shape=(self._end, self._bytes))
        rows = torch.from_numpy(content)
        return {key: rows[place].view(self._dtype).view(self._shape) for key, place in self._places.items()}


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _not_written(error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"What clients keep cannot be written to `{tempfile.gettempdir()}`: {error.strerror or error}.",
        'Make room there, set `TMPDIR` to another folder, or use `client_states="memory"`.',
    )
