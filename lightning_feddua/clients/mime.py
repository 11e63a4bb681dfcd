"""Mime and MimeLite: a centralized optimizer's statistics, frozen during local steps (Karimireddy et al., 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightning_feddua.checks import check_choice, check_decay, check_positive
from lightning_feddua.clients.local_training import LocalRound, LocalTraining

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate

STATISTICS = ("none", "momentum", "adam")


class MimeLite(LocalTraining):
    """Local steps ``y −= η_l U(g, s)`` with server statistics ``s`` that only full gradients change.

    ``U`` is momentum, ``(1 − β₁) g + β₁ m``, or Adam, which divides that by ``√v + ε``. After a round ``m`` and ``v``
    are updated with the mean of the clients' full gradients at ``w_t``, which takes one more pass over their data. The
    module's optimizer must be plain SGD.

    Args:
        statistics: ``"momentum"``, ``"adam"``, or ``"none"``.
        beta1: memory of ``m``.
        beta2: memory of ``v``.
        eps: added to ``√v``.
    """

    extra_vectors: tuple[str, ...] = ("full_gradient",)
    needs_full_gradient = True
    needs_constant_lr = True

    def __init__(
        self,
        statistics: Literal["none", "momentum", "adam"] = "momentum",
        beta1: float = 0.9,
        beta2: float = 0.99,
        eps: float = 1e-3,
    ) -> None:
        super().__init__()
        check_choice("kind of statistics", statistics, STATISTICS)
        check_decay("beta1", beta1)
        check_decay("beta2", beta2)
        check_positive("eps", eps, finite=True)
        self.statistics = statistics
        self.coordinate_adaptive = statistics == "adam"
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def set_up(self, weights: Tensor, population: int, local_steps: int | None) -> None:
        """``m = v = 0``."""
        names = {"none": (), "momentum": ("m",), "adam": ("m", "v")}[self.statistics]
        self.vectors = {name: torch.zeros_like(weights) for name in names}

    def correct(self, gradient: Tensor, weights: Tensor, local: LocalRound) -> None:
        """``U(g, s)``."""
        if "m" in self.vectors:
            gradient.mul_(1 - self.beta1).add_(self.vectors["m"], alpha=self.beta1)
        if "v" in self.vectors:
            gradient.div_(self.vectors["v"].sqrt().add_(self.eps))

    def finish(self, delta: Tensor, local: LocalRound) -> dict[str, Tensor]:
        """The gradient of all of the client's data at ``w_t``."""
        assert local.full_gradient is not None
        return {"full_gradient": local.full_gradient}

    def aggregate(self, weights: Tensor, update: RoundUpdate, eta_g: float) -> None:
        """``s = V(mean ∇F_i(w_t), s)``."""
        self._take_in(update.extra_vectors["full_gradient"])

    def _take_in(self, c: Tensor) -> None:
        if "m" in self.vectors:
            self.vectors["m"].mul_(self.beta1).add_(c, alpha=1 - self.beta1)
        if "v" in self.vectors:
            self.vectors["v"].mul_(self.beta2).addcmul_(c, c, value=1 - self.beta2)


class Mime(MimeLite):
    """MimeLite with drift corrected as in SVRG: ``y −= η_l U(g(y) − g(w_t) + c, s)``, both ``g`` of the same minibatch.

    ``c``, the mean of the cohort's full gradients at ``w_t``, is needed before the first local step: each round has a
    second reduction, and each local step a second gradient.

    Args:
        statistics: ``"momentum"``, ``"adam"``, or ``"none"``.
        beta1: memory of ``m``.
        beta2: memory of ``v``.
        eps: added to ``√v``.
    """

    extra_vectors: tuple[str, ...] = ()
    client_adaptive = True
    needs_full_gradient = False
    needs_mean_gradient = True
    needs_anchor_gradient = True

    def begin_round(self, lr: float, mean_gradient: Tensor | None) -> None:
        """Keep ``c`` for the round."""
        assert mean_gradient is not None
        self.vectors["c"] = mean_gradient

    def correct(self, gradient: Tensor, weights: Tensor, local: LocalRound) -> None:
        """``U(g(y) − g(w_t) + c, s)``."""
        assert local.anchor_gradient is not None
        gradient.sub_(local.anchor_gradient).add_(self.vectors["c"])
        super().correct(gradient, weights, local)

    def finish(self, delta: Tensor, local: LocalRound) -> dict[str, Tensor]:
        """Nothing to send: the server knows ``c``."""
        return {}

    def aggregate(self, weights: Tensor, update: RoundUpdate, eta_g: float) -> None:
        """``s = V(c, s)``."""
        self._take_in(self.vectors["c"])
