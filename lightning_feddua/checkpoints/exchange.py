"""A checkpoint that rank 0 has read, on every rank, with the memory of one copy on each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_feddua.aggregation.collectives import broadcast_tensor, on_rank_zero
from lightning_feddua.checkpoints.trees import map_tensors


@dataclass(frozen=True)
class _Place:
    """Where a tensor is in the memory that is sent after the plain values."""

    memory: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_on_rank_zero(fabric: Fabric, function: Callable[..., Any], *arguments: Any) -> Any:
    """The tree that a function returns which rank 0 alone calls, on every rank; a collective.

    Plain values travel as an object, and each tensor's memory once, as it is. In an object, every tensor would be
    copied several times, with the whole memory that it is a window on.

    Raises:
        ConfigurationError: rank 0 has raised one; every rank raises the same.
        RankError: rank 0 has raised something else, which it raises itself.
    """
    memories: list[Tensor] = []
    known: dict[int, int] = {}
    trees: list[Any] = []

    def place(tensor: Tensor) -> _Place | Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor
        storage = tensor.untyped_storage()
        if (address := storage.data_ptr()) not in known:
            known[address] = len(memories)
            memories.append(torch.empty(0, dtype=torch.uint8).set_(storage))
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return _Place(known[address], tensor.dtype, int(tensor.storage_offset()), shape, strides)

    def read() -> Any:
        trees.append(function(*arguments))
        if fabric.world_size == 1:
            return None
        return map_tensors(trees[0], place), [memory.numel() for memory in memories]

    told = on_rank_zero(fabric, read)
    if told is None:
        return trees[0]
    skeleton, sizes = told
    if not trees:
        memories = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for memory in memories:
        broadcast_tensor(fabric, memory)
    return trees[0] if trees else _filled(skeleton, memories)


def _filled(tree: Any, memories: list[Tensor]) -> Any:
    """A tree with tensors in their places."""
    if isinstance(tree, _Place):
        empty = torch.empty(0, dtype=tree.dtype)
        return empty.set_(memories[tree.memory].untyped_storage(), tree.offset, tree.shape, tree.strides)
    if isinstance(tree, dict):
        for key, value in tree.items():
            tree[key] = _filled(value, memories)
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(_filled(value, memories) for value in tree)
    return tree
