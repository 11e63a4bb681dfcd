"""Tensors, arrays and generators that a snapshot remembers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_feddua._private import version_of
from lightning_feddua.host.hidden.parts import Part
from lightning_feddua.host.hidden.same_values import generator_state, same_value, set_generator_state


class TensorContent(Part):
    """A tensor outside of the module's parameters and buffers.

    Args:
        label: what a user knows it by.
        value: the tensor.
        saved: a copy of it, if there is one already.
    """

    def __init__(self, label: str, value: Tensor, saved: Tensor | None = None) -> None:
        super().__init__(label, value)
        self.saved = value.detach().clone() if saved is None else saved

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensor by its label."""
        yield self.label, self.value

    def version(self) -> tuple[int, int]:
        """What tells without a look at the numbers that it may have changed; writes to ``.data`` do not show."""
        tensor = self.value
        return (-1 if tensor.is_inference() else version_of(tensor), tensor.data_ptr() if _has_memory(tensor) else 0)

    def same(self) -> bool:
        """All of its elements."""
        return same_value(self.saved, self.value.detach())

    def restore(self) -> None:
        """The same numbers in the same memory, or in new memory where the shape has changed."""
        tensor = self.value
        if self.same():
            return
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            try:
                if tensor.shape != self.saved.shape:
                    raise RuntimeError
                tensor.copy_(self.saved)
            except RuntimeError:
                # Also a tensor of which several elements share memory.
                tensor.data = self.saved.clone()

    def renew(self) -> bool:
        """Copy it again."""
        self.saved = self.value.detach().clone()
        return True


class ArrayContent(Part):
    """A NumPy array.

    Args:
        label: what a user knows it by.
        value: the array.
        saved: a copy of it, if there is one already.
    """

    def __init__(self, label: str, value: np.ndarray, saved: np.ndarray | None = None) -> None:
        super().__init__(label, value)
        self.saved = value.copy() if saved is None else saved

    def renew(self) -> bool:
        """Copy it again."""
        self.saved = self.value.copy()
        return True

    def restore(self) -> None:
        """The same numbers in the same memory."""
        if self.value.shape != self.saved.shape:
            self.value.resize(self.saved.shape, refcheck=False)
        if self.value.flags.writeable:
            self.value[...] = self.saved


class GeneratorState(Part):
    """A random number generator of NumPy's, torch's or Python's."""

    def __init__(self, label: str, value: Any) -> None:
        super().__init__(label, value)
        self.saved = generator_state(value)

    def same(self) -> bool:
        """Whether nothing has been drawn."""
        return same_value(self.saved, generator_state(self.value))

    def restore(self) -> None:
        """As if nothing had been drawn."""
        set_generator_state(self.value, self.saved)

    def renew(self) -> bool:
        """As it is now."""
        self.saved = generator_state(self.value)
        return True


class Flags(Part):
    """Whether the parameters of a module require gradients."""

    def __init__(self, label: str, value: Mapping[str, Tensor]) -> None:
        super().__init__(label, value)
        self._tensors = list(value.values())
        self.saved = [tensor.requires_grad for tensor in self._tensors]

    def same(self) -> bool:
        """Whether none has been frozen or unfrozen."""
        return [tensor.requires_grad for tensor in self._tensors] == self.saved

    def changes(self) -> Iterator[str]:
        """The parameters that have been frozen or unfrozen."""
        for (name, tensor), flag in zip(self.value.items(), self.saved, strict=True):
            if tensor.requires_grad != flag:
                yield f"{self.label}.{name}.requires_grad"

    def restore(self) -> None:
        """Freeze and unfreeze them."""
        for tensor, flag in zip(self._tensors, self.saved, strict=True):
            tensor.requires_grad_(flag)


class Gradient(Part):
    """The gradient of a tensor that no optimizer of the run looks after."""

    def __init__(self, label: str, value: Tensor) -> None:
        super().__init__(f"{label}.grad", value)
        self.saved = value.grad

    def same(self) -> bool:
        """The same tensor, or none."""
        return self.value.grad is self.saved

    def restore(self) -> None:
        """The same tensor again, or none."""
        self.value.grad = self.saved


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta"
