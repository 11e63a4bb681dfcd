"""Many small tensors or arrays of one shape, such as a replay buffer's, which a snapshot looks at together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_feddua._private import version_of
from lightning_feddua.host.hidden.parts import Part
from lightning_feddua.host.hidden.same_values import same_value
from lightning_feddua.host.hidden.tensors import ArrayContent, TensorContent

# From so many of one shape on, if each has at most so many bytes.
_FEW, _SMALL = 256, 1 << 14
# Of more than these it takes a deep comparison to see that they have been written to.
_MANY = 10_000


class Group(Part):
    """Tensors or arrays of one shape and one type, kept as one copy.

    Args:
        labels: what a user knows each by.
        values: the tensors or arrays.
        before: an earlier group that begins with the same one, whose copy is used again if it still holds.
    """

    def __init__(self, labels: Sequence[str], values: list[Any], before: Part | None = None) -> None:
        super().__init__(labels[0], values)
        self._labels = labels
        self._are_tensors = isinstance(values[0], Tensor)
        kept = isinstance(before, Group) and len(before.value) == len(values) and all(map(is_, before.value, values))
        self.saved = before.saved if before is not None and kept and before.same() else self._together()

    @property
    def identity(self) -> int:
        """That of the first."""
        return id(self.value[0])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors by their labels; none if these are arrays."""
        return zip(self._labels, self.value if self._are_tensors else (), strict=False)

    def version(self) -> list[int]:
        """What tells without a look at the numbers that tensors may have changed."""
        return [version_of(t) for t in self.value] if self._are_tensors and len(self.value) <= _MANY else []

    def same(self) -> bool:
        """All elements of all."""
        try:
            return same_value(self.saved, self._together())
        except (RuntimeError, ValueError):
            # Some have another shape now.
            return False

    def changes(self) -> Iterator[str]:
        """The labels of those that have changed."""
        return (part.label for part in self._single() if not part.same()) if not self.same() else iter(())

    def restore(self) -> None:
        """The same numbers in the same memory."""
        for part in self._single():
            if not part.same():
                part.restore()

    def renew(self) -> bool:
        """Copy them again, if they still have one shape."""
        try:
            self.saved = self._together()
        except (RuntimeError, ValueError):
            return False
        return True

    def _together(self) -> Any:
        if not self._are_tensors:
            return np.concatenate(self.value).reshape(len(self.value), *self.value[0].shape)
        with torch.no_grad():
            return torch.stack(self.value)

    def _single(self) -> Iterator[TensorContent | ArrayContent]:
        kind: Any = TensorContent if self._are_tensors else ArrayContent
        return (
            kind(label, value, saved) for label, value, saved in zip(self._labels, self.value, self.saved, strict=True)
        )


def groups_of(
    labelled: Sequence[tuple[str, Any]], before: Mapping[int, Part]
) -> tuple[list[Group], list[tuple[str, Any]]]:
    """Groups of what there is many of, and the rest.

    Args:
        labelled: tensors and arrays, with what a user knows them by.
        before: the parts of an earlier snapshot, by identity.
    """
    if len(labelled) < _FEW:
        return [], list(labelled)
    kinds: dict[Any, list[tuple[str, Any]]] = {}
    for label, value in labelled:
        kinds.setdefault(_kind(value), []).append((label, value))
    rest = kinds.pop(None, [])
    groups = []
    for members in kinds.values():
        if len(members) < _FEW:
            rest += members
        else:
            labels, values = zip(*members, strict=True)
            groups.append(Group(labels, list(values), before.get(id(values[0]))))
    return groups, rest


def _kind(value: Any) -> Any:
    """What small tensors and arrays have in common that can be put together; None for others."""
    if type(value) is Tensor:
        plain = value.layout == torch.strided and value.device.type != "meta" and not value.is_inference()
        small = value.numel() * value.element_size() <= _SMALL and not value.requires_grad
        return (value.dtype, value.device, value.shape) if plain and small else None
    if type(value) is np.ndarray and value.dtype.kind in "biufc" and value.ndim and 0 < value.nbytes <= _SMALL:
        return value.dtype, value.shape
    return None
