"""Accumulators ``s`` of the squared mean update; the preconditioner is ``G = √s + ε``."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_feddua.vectors import Scratch

# Updates `s` in place with the round's mean update: (s, mean_delta, beta2, scratch).
Accumulate = Callable[[Tensor, Tensor, float, Scratch], object]


def adagrad(s: Tensor, mean_delta: Tensor, beta2: float, scratch: Scratch) -> None:
    """``s += Δ̄²``."""
    s.addcmul_(mean_delta, mean_delta)


def adam(s: Tensor, mean_delta: Tensor, beta2: float, scratch: Scratch) -> None:
    """``s = β₂ s + (1 − β₂) Δ̄²``."""
    s.mul_(beta2).addcmul_(mean_delta, mean_delta, value=1 - beta2)


def yogi(s: Tensor, mean_delta: Tensor, beta2: float, scratch: Scratch) -> None:
    """``s −= (1 − β₂) Δ̄² sign(s − Δ̄²)``."""
    square = torch.square(mean_delta, out=scratch.empty("square", s))
    sign = torch.sub(s, square, out=scratch.empty("sign", s)).sign_()
    s.addcmul_(square, sign, value=beta2 - 1)


# None: G is the identity.
PRECONDITIONERS: dict[str, Accumulate | None] = {"identity": None, "adagrad": adagrad, "adam": adam, "yogi": yogi}
