"""A server step as two compiled passes over the vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_feddua._private import STORED_VALUES_ARE_READ
from lightning_feddua.agreement import ELEMENTWISE_TOLERANCE, relative_difference, short_reason, warn_not_compiled
from lightning_feddua.vectors import scalar_dtype

# How many coordinates compiled and eager passes are compared on.
_SAMPLE = 1 << 16

# What is stored and then read again becomes a value of the loop that stores it. As it comes, inductor computes v and s
# twice instead, once for the norm and once to store them, in two loops over the same vectors.
_ONE_LOOP = STORED_VALUES_ARE_READ


class ServerKernels:
    """The two passes, to be compiled for vectors of any length.

    Args:
        moments: brings v and s up to date and returns ``‖v‖²_{G⁻¹}``, if the step needs it.
        move: moves the weights.
    """

    def __init__(self, moments: Callable[..., Tensor | None], move: Callable[..., None]) -> None:
        self._eager = self._moments, self._move = moments, move

    def moments(self, delta: Tensor, v: Tensor | None, s: Tensor | None, s_correction: float) -> Tensor | None:
        """The first pass."""
        return self._moments(delta, v, s, _number(s_correction, delta))

    def move(self, w: Tensor, v: Tensor, s: Tensor | None, scale: float, s_correction: float) -> None:
        """The second pass."""
        self._move(w, v, s, _number(scale, w), _number(s_correction, w))

    def compile(self, weights: Tensor, delta: Tensor, v: Tensor | None, s: Tensor | None) -> bool:
        """Compile them, and say whether they compute what the eager passes do, on copies of some coordinates.

        A warning says why not.
        """
        results = []
        try:
            self._moments = torch.compile(self._eager[0], dynamic=True, options=_ONE_LOOP)
            self._move = torch.compile(self._eager[1], dynamic=True)
            for moments, move in (self._eager, (self.moments, self.move)):
                w, d = (x[:_SAMPLE].clone() for x in (weights, delta))
                v_part, s_part = (None if x is None else x[:_SAMPLE].clone() for x in (v, s))
                total = moments(d, v_part, s_part, 0.5)
                move(w, d, s_part, 0.25, 0.5)
                results.append([x for x in (total, w, v_part, s_part) if x is not None])
        except Exception as error:
            warn_not_compiled("The server step", short_reason(error))
            return False
        # Tensor by tensor: their scales have nothing to do with each other.
        differences = [relative_difference([a], [b]) for a, b in zip(*results, strict=True)]
        if not all(difference <= ELEMENTWISE_TOLERANCE[weights.dtype] for difference in differences):
            reason = f"the compiled one computes something else, which differs by {max(differences):.1e}"
            warn_not_compiled("The server step", reason)
            return False
        return True


def _number(value: float, like: Tensor) -> Tensor:
    """A number that changes between rounds: as a Python float it would be compiled in."""
    return torch.tensor(value, dtype=scalar_dtype(like.device), device=like.device)
