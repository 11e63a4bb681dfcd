"""Digests of the clients' data, by which a changed sample is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_feddua._private import tree_leaves
from lightning_feddua.data.partition import Partition
from lightning_feddua.engines.time_limit import time_limit
from lightning_feddua.randomness import Purpose, seed_generators

if TYPE_CHECKING:
    from lightning_feddua.host.federation import Federation

# Clients whose samples are read, and samples of each.
_PROBED_CLIENTS = 16
_PROBED_SAMPLES = 4
_TOLERANCE = 1e-4
# For more clients than these, one digest stands for all of them.
_NAMED_CLIENTS = 10_000
# How deep arrays may be in a dataset's attributes.
_DEPTH = 6
# Of larger arrays, which may be files mapped into memory, so many blocks of this size are looked at.
_LARGEST = 1 << 30
_BLOCKS, _BLOCK = 1024, 1 << 20
# What a dataset has read once is no part of what it is.
_CACHE = "cache"
_DIGITS = 16


def data_digests(federation: Federation) -> dict[str, Any]:
    """What tells whether the clients' data is the same, to the bit.

    Arrays and lists in the datasets' attributes are looked at as a whole. Of what is computed or read from files when
    it is asked for, a few samples of a few clients are.

    Args:
        federation: the module and its clients.
    """
    clients = federation.datamodule.clients
    seen: dict[int, str] = {}
    each: list[str] = []
    if isinstance(clients, Partition):
        each = [_contents_digest(clients.dataset, seen), digest([_bytes(clients.all_rows)])]
    elif isinstance(clients, dict):
        each = [_contents_digest(dataset, seen) for dataset in clients.values()]
    return {
        "contents": each if len(each) <= _NAMED_CLIENTS else [digest(map(str.encode, each))],
        "probes": [_probe(federation, place) for place in _probed_places(federation)],
    }


def differing_client(before: Mapping[str, Any], now: Mapping[str, Any], federation: Federation) -> str | None:
    """Where the data is not what it was, as a phrase; None if it is.

    Args:
        before: the digests of the run that was saved.
        now: those of this one.
        federation: the module and its clients.
    """
    ids, clients = federation.client_ids, federation.datamodule.clients
    places = [i for i, pair in enumerate(zip(before["contents"], now["contents"], strict=False)) if len({*pair}) > 1]
    if len(before["contents"]) != len(now["contents"]):
        return "the clients' samples"
    if places and len(now["contents"]) == len(ids) and isinstance(clients, dict):
        return f"the data of client `{ids[places[0]]}`"
    if places and isinstance(clients, Partition):
        return ("the dataset", "the clients' rows")[places[0]]
    for place, one, other in zip(_probed_places(federation), before["probes"], now["probes"], strict=True):
        if not _agree(one, other):
            return f"the data of client `{ids[place]}`"
    return "the clients' samples" if places else None


def _probed_places(federation: Federation) -> list[int]:
    return np.unique(np.linspace(0, len(federation.client_ids) - 1, _PROBED_CLIENTS).astype(int)).tolist()


def _probe(federation: Federation, place: int) -> list[list[float]]:
    """Sums over each tensor of a client's first samples; none where they differ between two looks."""
    first, second = (_sums(federation, place) for _ in range(2))
    # As text, in which NaN is the same as NaN.
    if repr(first) == repr(second):
        return first
    federation.unsteady_client = federation.unsteady_client or str(federation.client_ids[place])
    return []


def _sums(federation: Federation, place: int) -> list[list[float]]:
    seed_generators(0, 0, place, Purpose.EVALUATION, federation.fabric.device)
    try:
        with time_limit(federation.work.timeout, str(federation.client_ids[place])):
            data = federation.client_data(place)
            batch = data.batch(np.arange(min(len(data), _PROBED_SAMPLES)))
    except Exception:
        # The run itself fails in the same way, and says so with the right client and round.
        return []
    sums = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and not leaf.is_complex():
            values = leaf.detach().cpu().to(torch.float64).flatten()
            # Weights, so that an exchange of two values shows.
            ramp = torch.arange(1, len(values) + 1, dtype=torch.float64) / max(len(values), 1)
            sums.append([values.sum().item(), (values * ramp).sum().item(), values.abs().sum().item()])
    return sums


def _agree(before: list[list[float]], now: list[list[float]]) -> bool:
    """Whether samples are the same, up to the roundings by which two machines may compute them."""
    if not before or not now:
        return True
    if len(before) != len(now):
        return False
    sums = np.array([before, now])
    return bool(np.allclose(sums[0], sums[1], rtol=0, atol=_TOLERANCE * sums[0][:, -1:] + 1e-12, equal_nan=True))


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """A digest of several byte strings, and of where one ends and the next begins."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()[:_DIGITS]


def _contents_digest(dataset: Any, seen: dict[int, str]) -> str:
    return digest(part.encode() for part in _contents(dataset, seen, _DEPTH))


def _contents(value: Any, seen: dict[int, str], depth: int) -> Iterator[str]:
    """What is in a value, in words; digests stand for arrays, and are computed once for those that clients share."""
    if isinstance(value, Tensor | np.ndarray):
        if id(value) not in seen:
            seen[id(value)] = f"{value.dtype} {tuple(value.shape)} {digest([_bytes(value)])}"
        yield seen[id(value)]
    elif isinstance(value, bool | int | float | complex | str | bytes | None):
        yield repr(value)
    elif depth == 0:
        return
    elif isinstance(value, list | tuple):
        plain = all(type(item) in (bool, int, float, str) for item in value)
        yield f"{len(value)}" if not plain else digest([repr(value).encode()])
        for item in () if plain else value:
            yield from _contents(item, seen, depth - 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key)
            yield from _contents(item, seen, depth - 1)
    elif hasattr(value, "itercolumns"):
        yield _arrow_digest(value, seen)
    elif hasattr(table := getattr(value, "data", None), "itercolumns"):
        yield _arrow_digest(table, seen)
        # The rows that were selected, if not all.
        yield from _contents(getattr(value, "_indices", None), seen, depth - 1)
    elif isinstance(value, Dataset) or (hasattr(value, "__getitem__") and hasattr(value, "__dict__")):
        for name, item in vars(value).items():
            # Numbers may count something; samples that depend on them are noticed by reading a few.
            if _CACHE not in name.lower() and not isinstance(item, bool | int | float | complex | str | None):
                yield name
                yield from _contents(item, seen, depth - 1)


def _arrow_digest(table: Any, seen: dict[int, str]) -> str:
    """A digest of an Arrow table, as Hugging Face's datasets have it."""
    if id(table) not in seen:
        columns = [chunk for column in table.itercolumns() for chunk in column.chunks]
        buffers = [buffer for chunk in columns for buffer in chunk.buffers() if buffer is not None]
        names = [str(field).encode() for field in table.schema]
        ranges = [f"{len(chunk)} {chunk.offset}".encode() for chunk in columns]
        sampled = [_sampled(np.frombuffer(buffer, np.uint8)) for buffer in buffers]
        seen[id(table)] = digest([*names, *ranges, *sampled])
    return seen[id(table)]


def _bytes(value: Tensor | np.ndarray) -> memoryview | bytes:
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
