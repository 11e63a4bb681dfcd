"""64-bit fingerprints of tensors, computed where the tensors are."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# Words per pass, so that what is computed on the way stays small, and in a CPU's cache.
_CHUNK = 1 << 16
_CHUNK_ON_DEVICE = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def fingerprint(tensor: Tensor, place: int = 0) -> Tensor | int:
    """A number that depends on every bit of a tensor and on where it is; a scalar on a device, so that nobody waits.

    The tensor's words, of 32 bits at most, are multiplied by odd numbers that depend on their place, and added up
    modulo 2**64. A change of one word always shows, and any other does but for one case in billions. Integers add up
    to the same in any order, so the number of threads or ranks makes no difference, and fingerprints of parts with
    different places can be added. It finds faults; it is no protection against somebody who looks for a collision.

    Args:
        tensor: any tensor.
        place: tells equal tensors apart, such as those of different clients.
    """
    words = _words(tensor)
    return _of_array(words.numpy(), place) if tensor.device.type == "cpu" else _of_words(words, place)


def _of_words(words: Tensor, place: int) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    odd = _odd_numbers_on(words.device)
    rows = _CHUNK_ON_DEVICE // _CHUNK
    for number, start in enumerate(range(0, len(words), _CHUNK_ON_DEVICE)):
        chunk = words[start : start + _CHUNK_ON_DEVICE]
        pieces = torch.zeros(_CHUNK_ON_DEVICE, dtype=torch.int64, device=words.device)
        torch.mul(chunk, odd[: len(chunk)], out=pieces[: len(chunk)])
        weights = torch.from_numpy(_chunk_weights(place, number * rows, rows)).to(words.device)
        total += (pieces.view(rows, _CHUNK).sum(1) * weights).sum()
    return total


def _of_array(words: np.ndarray, place: int) -> int:
    odd, count = _odd_numbers(), -(-len(words) // _CHUNK)
    weights = _chunk_weights(place, 0, count)
    if count == 1:
        return _signed(int(words.astype(np.int64) @ odd[: len(words)]) * int(weights[0]))
    sums = np.empty(count, np.int64)
    for number in range(count):
        chunk = words[number * _CHUNK : (number + 1) * _CHUNK].astype(np.int64)
        sums[number] = chunk @ odd[: len(chunk)]
    return int(sums @ weights)


def _signed(number: int) -> int:
    """A number modulo 2**64, as a 64-bit integer holds it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as a vector of integers."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


@lru_cache(maxsize=1)
def _odd_numbers() -> np.ndarray:
    return _mixed(np.arange(_CHUNK, dtype=np.uint64))


@lru_cache(maxsize=16)
def _odd_numbers_on(device: torch.device) -> Tensor:
    return torch.from_numpy(_odd_numbers()).to(device).repeat(_CHUNK_ON_DEVICE // _CHUNK)


@lru_cache(maxsize=64)
def _chunk_weights(place: int, first: int, count: int) -> np.ndarray:
    start = (place + 1) << 32
    return _mixed(np.arange(start + first, start + first + count, dtype=np.uint64))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Odd numbers without a pattern, by the finaliser of splitmix64."""
    values = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((values ^ (values >> np.uint64(31))) | np.uint64(1)).view(np.int64)
