"""What training steps leave in a module besides parameters and buffers, undone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_feddua._private import tree_leaves, version_of

# What a module keeps its parameters, buffers and submodules in.
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set)


@contextmanager
def preserved_attributes(module: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Give a module's own attributes back as they were; the value tells which got other tensors in between.

    What a training step keeps under vmap is of no use outside, and would break the next step that reads it.
    """
    before = {
        (path, name): (owner, value, copy.copy(value) if isinstance(value, _CONTAINERS) else None)
        for path, owner, name, value in _attributes(module)
    }
    # An LSTM, for one, has its parameters in a list as well.
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    tensors = [
        (_label(path, name), leaf, version_of(leaf), leaf.detach().clone())
        for (path, name), (_, value, _) in before.items()
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor) and id(leaf) not in registered and not leaf.is_inference()
    ]
    changed: list[str] = []
    try:
        yield lambda: changed
    finally:
        for path, owner, name, value in list(_attributes(module)):
            known = before.get((path, name))
            if known is None:
                delattr(owner, name)
            elif known[1] is not value:
                object.__setattr__(owner, name, known[1])
            elif known[2] is not None and not _same_items(known[2], value):
                value.clear()
                value.extend(known[2]) if isinstance(value, list) else value.update(known[2])
            else:
                continue
            if not is_torchs_own(owner) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                changed.append(_label(path, name))
        with torch.no_grad():
            for label, tensor, version, copied in tensors:
                if version_of(tensor) != version:
                    tensor.copy_(copied)
                    changed.append(label)


def is_torchs_own(module: nn.Module) -> bool:
    """Whether a module's class is torch's own: such as an LSTM with its list of weights restore themselves."""
    return type(module).__module__.startswith("torch.")


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers, strings and truth values among a module's attributes, those of its submodules included, by name."""
    return {
        _label(path, name): value
        for path, _, name, value in _attributes(module)
        if isinstance(value, bool | int | float | str)
    }


def _attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if name not in _REGISTRIES:
                yield path, owner, name, value


def _label(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _same_items(first: list[Any] | dict[Any, Any] | set[Any], second: Any) -> bool:
    """Whether two containers hold the same objects; tensors cannot be compared with ``==``."""
    if isinstance(first, set) or len(first) != len(second):
        return first == second
    if isinstance(first, dict):
        return all(key in second and second[key] is value for key, value in first.items())
    return all(a is b for a, b in zip(first, second, strict=True))
