"""A module that computes with other parameters and buffers than its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_feddua._private import BUFFERS, PARAMETERS


class Substitution:
    """Puts tensors in the places of a module's own, as :func:`torch.func.functional_call` does.

    That looks for all of them, and for those that are tied, in each call, which takes longer than a small step.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        by_tensor: dict[int, list[tuple[dict[str, Any], str]]] = {}
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for path, owner in module.named_modules():
            for registry in (getattr(owner, PARAMETERS), getattr(owner, BUFFERS)):
                for name, tensor in registry.items():
                    if tensor is not None:
                        places = by_tensor.setdefault(id(tensor), [])
                        places.append((registry, name))
                        self._places[f"{path}.{name}".lstrip(".")] = places

    @contextmanager
    def of(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Compute with these.

        Args:
            tensors: by the names of those that they replace; all places of a tied one are filled.
        """
        before = []
        try:
            for name, tensor in tensors.items():
                for registry, own_name in self._places[name]:
                    before.append((registry, own_name, registry[own_name]))
                    registry[own_name] = tensor
            yield
        finally:
            for registry, own_name, tensor in before:
                registry[own_name] = tensor
