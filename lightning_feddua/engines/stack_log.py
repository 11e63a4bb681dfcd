"""What the clients of a stack log, reduced over their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_feddua.engines.stack_parts import Part, merged

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class StackLog:
    """Reduces logged values as :class:`LogCapture` does, for all clients of a stack that still train."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        # One number where all clients have the same.
        self._weights: dict[str, float | np.ndarray] = {}
        self._kinds: dict[str, str] = {}

    def add(
        self, name: str, kind: str, parts: Sequence[Part], values: Sequence[Tensor], weights: Sequence[float], size: int
    ) -> None:
        """Add what has been logged in a step.

        Args:
            name: under which name.
            kind: how it is reduced: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
            parts: the parts of the stack.
            values: the values of each part.
            weights: the weight of each part in a mean.
            size: the number of clients.
        """
        known = self._values.get(name)
        self._kinds[name] = kind
        if kind != "mean":
            value = merged(parts, values, size)
            self._values[name] = value.clone() if known is None else _REDUCTIONS[kind](known, value)
            return
        if len(parts) == 1:
            weight: float | np.ndarray = weights[0]
            total = values[0] * weights[0] if known is None else torch.add(known, values[0], alpha=weights[0])
        else:
            weight = np.empty(size)
            for part, own in zip(parts, weights, strict=True):
                weight[part.places] = own
            product = merged(parts, [value * own for value, own in zip(values, weights, strict=True)], size)
            total = product if known is None else known + product
        self._values[name] = total
        self._weights[name] = weight if known is None else self._weights[name] + weight

    def end(self, start: int) -> dict[str, Tensor]:
        """The reduced values of the clients from a place on, which have made their last step, and are forgotten."""
        found = {}
        for name, value in self._values.items():
            ended = value[start:]
            if self._kinds[name] == "mean":
                weight = self._weights[name]
                if isinstance(weight, np.ndarray):
                    self._weights[name] = weight[:start]
                    own = torch.from_numpy(weight[start:])
                    found[name] = ended / own.to(ended.device, ended.dtype)
                else:
                    found[name] = ended / weight
            else:
                found[name] = ended
            self._values[name] = value[:start]
        return found
