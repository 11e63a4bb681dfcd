"""What is in a dataset, as digests: all that it keeps in memory."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# How deep arrays may be in a dataset's attributes.
_DEPTH = 6
# Of larger arrays, which may be files mapped into memory, so many blocks of this size are looked at.
_LARGEST = 1 << 30
_BLOCKS, _BLOCK = 1024, 1 << 20
# What a dataset has read once is no part of what it is.
_CACHE = "cache"
_DIGITS = 16
_NUMBERS = bool | int | float | complex | np.generic


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """A digest of several byte strings, and of where one ends and the next begins."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()[:_DIGITS]


class Contents:
    """Digests of values, computed once for arrays that several of them share.

    Args:
        volatile: attributes that do not count, as ``Class.attribute``.
    """

    def __init__(self, volatile: Iterable[str] = ()) -> None:
        self._volatile = frozenset(volatile)
        # The arrays are kept, so that nothing else comes to their addresses.
        self._seen: dict[int, tuple[Any, str]] = {}

    def digest(self, value: Any) -> str:
        """A digest of a dataset, or of anything that is kept in one."""
        return digest(part.encode(errors="surrogatepass") for part in self._words(value, _DEPTH))

    def _words(self, value: Any, depth: int, inside: bool = False) -> Iterator[str]:
        """What is in a value, in words; ``inside`` a list or the like, any object is a sample or a part of one."""
        if isinstance(value, Tensor | np.ndarray):
            yield self._once(value, lambda: f"{value.dtype} {tuple(value.shape)} {digest([array_bytes(value)])}")
        elif isinstance(value, str | bytes | range | None | _NUMBERS):
            yield repr(value.item() if isinstance(value, np.generic) else value)
        elif isinstance(value, bytearray | memoryview | array):
            yield digest([bytes(value)])
        elif depth == 0:
            return
        elif isinstance(value, list | tuple | deque):
            plain = all(type(item) in (bool, int, float, str) for item in value)
            yield f"{len(value)}" if not plain else digest([repr(list(value)).encode(errors="surrogatepass")])
            for item in () if plain else value:
                yield from self._words(item, depth - 1, inside=True)
        elif isinstance(value, set | frozenset):
            yield digest(sorted(repr(item).encode() for item in value))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield repr(key)
                yield from self._words(item, depth - 1, inside=True)
        elif hasattr(value, "itercolumns"):
            yield self._once(value, lambda: _arrow_digest(value))
        elif hasattr(table := getattr(value, "data", None), "itercolumns"):
            yield self._once(table, lambda: _arrow_digest(table))
            # The rows that were selected, if not all.
            yield from self._words(getattr(value, "_indices", None), depth - 1)
        elif hasattr(value, "to_numpy"):
            # A frame of pandas or polars, or one of its columns.
            yield self._once(value, lambda: _frame_digest(value))
        elif isinstance(value, functools.partial):
            yield from self._words((value.func, value.args, value.keywords), depth - 1)
        elif isinstance(value, DataLoader):
            yield f"{value.batch_size} {value.drop_last} {type(value.sampler).__name__}"
            yield from self._words((value.dataset, value.collate_fn, value.batch_sampler), depth - 1)
        elif hasattr(value, "__qualname__"):
            yield value.__qualname__
        else:
            for name, item in self.attributes(value, inside):
                yield name
                yield from self._words(item, depth - 1)

    def attributes(self, value: Any, inside: bool = False) -> Iterator[tuple[str, Any]]:
        """The attributes of a dataset, of what it does to samples, or of a sample, as far as they are what it is."""
        is_data = isinstance(value, Dataset) or hasattr(value, "__getitem__") or hasattr(value, "tocsr")
        if not hasattr(value, "__dict__") or not (is_data or callable(value) or inside):
            return
        if not is_data:
            yield type(value).__qualname__, None
        for name, item in vars(value).items():
            # Where something is kept, or what it is called, does not matter.
            if _CACHE in name.lower() or isinstance(item, str | None) or attribute_name(value, name) in self._volatile:
                continue
            if not (isinstance(value, nn.Module) and name == "training"):
                yield name, item

    def _once(self, value: Any, compute: Any) -> str:
        if id(value) not in self._seen:
            self._seen[id(value)] = value, compute()
        return self._seen[id(value)][1]

    def states(self, value: Any, depth: int = _DEPTH) -> dict[tuple[int, str], Any]:
        """What attributes are at the moment, by the object and what they are called; by their kind, if not numbers."""
        found: dict[tuple[int, str], Any] = {}
        if depth and not isinstance(value, Tensor | np.ndarray | str | bytes) and hasattr(value, "__dict__"):
            for name, item in list(vars(value).items()):
                state = repr(item) if isinstance(item, bool | int | float | complex) else type(item)
                found[id(value), attribute_name(value, name)] = state
                found |= self.states(item, depth - 1) if any(self.attributes(item)) else {}
        return found


def attribute_name(value: Any, name: str) -> str:
    """What an attribute is called, in all objects of a class."""
    return f"{type(value).__qualname__}.{name}"


def array_bytes(value: Tensor | np.ndarray) -> memoryview | bytes:
    """The bytes of an array, or some of them where there are very many."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.layout is not torch.strided or value.is_quantized:
            return repr(value).encode()
        value = value.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
    if value.dtype.hasobject:
        return repr(value.tolist()).encode()
    return _sampled(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _sampled(values: np.ndarray) -> memoryview | bytes:
    if len(values) <= _LARGEST:
        return values.data
    starts = np.linspace(0, len(values) - _BLOCK, _BLOCKS).astype(np.int64)
    return digest(values[start : start + _BLOCK].data for start in starts).encode()


def _arrow_digest(table: Any) -> str:
    """A digest of an Arrow table, as Hugging Face's datasets have it."""
    columns = [chunk for column in table.itercolumns() for chunk in column.chunks]
    buffers = [buffer for chunk in columns for buffer in chunk.buffers() if buffer is not None]
    names = [str(field).encode() for field in table.schema]
    ranges = [f"{len(chunk)} {chunk.offset}".encode() for chunk in columns]
    return digest([*names, *ranges, *(_sampled(np.frombuffer(buffer, np.uint8)) for buffer in buffers)])


def _frame_digest(frame: Any) -> str:
    columns = getattr(frame, "columns", None)
    parts = [frame] if columns is None else [frame[name] for name in columns]
    names = [] if columns is None else [repr(list(columns)).encode()]
    index = getattr(frame, "index", None)
    parts += [index] if hasattr(index, "to_numpy") else []
    return digest([*names, *(array_bytes(np.asarray(part.to_numpy())) for part in parts)])
