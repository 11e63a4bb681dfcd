"""What a checkpoint is made of: tensors and plain values in dictionaries, lists, tuples and sets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_feddua._private import metadata_of, set_metadata

_MOST_VALUES = 50_000_000


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """A copy of a tree with something else in the place of each tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        items = [(key, map_tensors(value, function)) for key, value in tree.items()]
        metadata = metadata_of(tree)
        if metadata is None:
            return type(tree)(items) if type(tree) is OrderedDict else dict(items)
        # A state dict, with the versions of its modules in an attribute.
        state_dict = OrderedDict(items)
        set_metadata(state_dict, metadata)
        return state_dict
    # A tensor has no place in a set, and the sizes of a tensor are a kind of tuple.
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(value, function) for value in tree)
    return tree


def check_size(tree: Any) -> None:
    """Whether a tree is as large as it looks: a pickle can name a part and repeat it, and the parts of that again.

    Raises:
        ValueError: it stands for more values than any checkpoint has.
    """
    _size(tree, {})


def _size(tree: Any, known: dict[int, int]) -> int:
    if not isinstance(tree, dict | list | tuple | set):
        return 1
    if id(tree) not in known:
        # What contains itself has no end.
        known[id(tree)] = _MOST_VALUES + 1
        parts = [*tree.keys(), *tree.values()] if isinstance(tree, dict) else tree
        known[id(tree)] = 1 + sum(_size(part, known) for part in parts)
    if known[id(tree)] > _MOST_VALUES:
        raise ValueError(f"it stands for more than {_MOST_VALUES:,} values")
    return known[id(tree)]


class Flat:
    """Makes tensors that are exactly their own memory, in one piece: no windows on something larger.

    A window would carry all of what it shows a part of wherever it is copied to, and could show anything. Memory is
    shared with the original where that is possible, and what is the same tensor before is the same afterwards.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """The same values on the CPU."""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in self._known:
            return self._known[key][1]
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if flat.untyped_storage().nbytes() != flat.nbytes:
            flat = _alone(flat)
        # The original is kept, so that nothing else comes to its address.
        self._known[key] = (tensor, flat)
        return flat


def _alone(tensor: Tensor) -> Tensor:
    """A tensor that knows no more memory than its own elements."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    window = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy())
    return window.view(tensor.dtype).view(tensor.shape)
