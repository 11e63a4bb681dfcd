"""Long vectors, a chunk at a time: norms in float64 and temporaries that are never as long."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Elements handled at a time where float64 or other temporaries are needed: small enough to stay in a CPU's cache. More
# where temporaries are kept: new ones of that size come from the operating system, page by page.
_CHUNK = 1 << 16


_CHUNK_KEPT = 1 << 18


_CHUNK_ACCELERATOR = 1 << 24


def chunk_size(device: torch.device, kept: bool = False) -> int:
    """How many elements to handle at a time on a device.

    Args:
        device: the device.
        kept: whether temporaries are those of a :class:`Scratch`.
    """
    if device.type != "cpu":
        return _CHUNK_ACCELERATOR
    return _CHUNK_KEPT if kept else _CHUNK


class Scratch:
    """Temporaries for one chunk after another. A CPU keeps them; an accelerator's allocator does so by itself."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def empty(self, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A temporary of a chunk's length, with anything in it.

        Args:
            name: the same memory is given again under the same name.
            like: the chunk.
            dtype: the chunk's own if left out.
        """
        dtype = dtype or like.dtype
        # A compiler makes its own plan, in which most temporaries do not exist.
        if like.device.type != "cpu" or torch.compiler.is_compiling():
            return torch.empty_like(like, dtype=dtype)
        kept = self._kept.get((name, dtype))
        if kept is None or len(kept) < len(like):
            kept = self._kept[name, dtype] = torch.empty_like(like, dtype=dtype)
        return kept[: len(like)]

    def cast(self, name: str, chunk: Tensor, dtype: torch.dtype) -> Tensor:
        """A chunk in another dtype; itself where it has that."""
        return chunk if chunk.dtype == dtype else self.empty(name, chunk, dtype).copy_(chunk)


def chunks(*vectors: Tensor | None, size: int | None = None) -> Iterator[tuple[Any, ...]]:
    """Windows of all vectors in step, so that temporaries stay in the cache and are never d-sized.

    Args:
        vectors: of one length; at least one is not None, and a None is handed on.
        size: of a window; by default as suits the device.
    """
    first = next(vector for vector in vectors if vector is not None)
    size = chunk_size(first.device) if size is None else size
    for start in range(0, first.numel(), size):
        yield tuple(None if vector is None else vector[start : start + size] for vector in vectors)


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype of accumulated scalars: float64, but for Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def squared_norm(vector: Tensor) -> Tensor:
    """``‖vector‖²`` accumulated in float64, as a tensor on the same device (no synchronisation)."""
    dtype = scalar_dtype(vector.device)
    if vector.numel() <= chunk_size(vector.device):
        vector = vector.to(dtype)
        return torch.dot(vector, vector)
    total = torch.zeros((), dtype=dtype, device=vector.device)
    for chunk in vector.split(chunk_size(vector.device)):
        chunk = chunk.to(dtype)
        total += torch.dot(chunk, chunk)
    return total
