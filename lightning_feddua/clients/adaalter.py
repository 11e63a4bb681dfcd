from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_feddua.checks import check_non_negative, check_positive
from lightning_feddua.clients.local_training import LocalRound, LocalTraining, broadcast

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate


class AdaAlter(LocalTraining):
    """Local AdaAlter: Adagrad's steps with an accumulator that is frozen during a round (Xie et al., 2019).

    The t'-th local step is ``x −= η_l g / √(B² + t' ε²)``; afterwards ``B²`` becomes the mean of the clients'
    ``B² + Σ g²``.

    Args:
        eps: ε, what each step of a round adds to the accumulator in place of its gradient.
        initial_accumulator: ``B²`` before the first round.
    """

    extra_vectors = ("squares",)
    coordinate_adaptive = True
    needs_constant_lr = True

    def __init__(self, eps: float = 1.0, initial_accumulator: float = 1.0) -> None:
        super().__init__()
        check_positive("eps", eps, finite=True)
        check_non_negative("initial_accumulator", initial_accumulator, "one, such as 1.0")
        self.eps = eps
        self.initial_accumulator = initial_accumulator

    def set_up(self, weights: Tensor, population: int, local_steps: int | None) -> None:
        """``B²`` at its initial value."""
        self.vectors = {"B²": torch.full_like(weights, self.initial_accumulator)}

    def correct(self, gradient: Tensor, weights: Tensor, local: LocalRound) -> None:
        """``g / √(B² + t' ε²)``."""
        if "squares" not in local.scratch:
            local.scratch["squares"] = torch.zeros_like(gradient, dtype=self.vectors["B²"].dtype)
        local.scratch["squares"].addcmul_(gradient, gradient)
        gradient.div_((self.vectors["B²"] + (local.step + 1) * self.eps**2).sqrt_())

    def finish(self, delta: Tensor, local: LocalRound) -> dict[str, Tensor]:
        """``Σ g²`` of the round."""
        return {"squares": local.scratch.get("squares", broadcast(torch.zeros_like(self.vectors["B²"]), delta))}

    def aggregate(self, weights: Tensor, update: RoundUpdate, eta_g: float) -> None:
        """``B² = mean(B² + Σ g²)``."""
        self.vectors["B²"].add_(update.extra_vectors["squares"])
