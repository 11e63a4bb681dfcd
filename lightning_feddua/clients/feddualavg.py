"""FedDualAvg: dual averaging with an L1 penalty (Yuan et al., 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lightning_feddua.clients.fedmid import FedMid, soft_threshold
from lightning_feddua.clients.local_training import LocalRound, broadcast

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate


class FedDualAvg(FedMid):
    """Federated dual averaging on ``F(w) + λ ‖w‖₁``: clients and server average in the dual space.

    The dual state ``z`` collects gradients, ``z −= η_l g``; weights are ``w = prox_{η̃ λ}(z)``, where ``η̃`` is the
    length of the path so far, ``η_g η_l r τ + η_l k``. The mean of sparse weights is not sparse; the prox of a mean
    dual state is.

    Args:
        l1: λ, the strength of the penalty.
    """

    def set_up(self, weights: Tensor, population: int, local_steps: int | None) -> None:
        """``z`` at the initial weights, and a path of length 0."""
        super().set_up(weights, population, local_steps)
        self.vectors = {"z": weights.clone()}
        self.numbers = {"path": 0.0}

    def project(self, weights: Tensor, local: LocalRound) -> None:
        """The optimizer's step is taken in the dual space: ``z += w' − w``, then ``w = prox(z)``."""
        if local.step == 0:
            local.scratch["z"] = broadcast(self.vectors["z"], weights)
        z = local.scratch["z"].add_(weights - local.scratch.get("w", local.anchor))
        path = self.numbers["path"] + local.lr * (local.step + 1)
        weights.copy_(soft_threshold(z, path * self.l1))
        local.scratch["w"] = weights.clone()

    def finish(self, delta: Tensor, local: LocalRound) -> dict[str, Tensor]:
        """What is averaged is the change of ``z``."""
        if local.step > 0:
            delta.copy_(local.scratch["z"] - self.vectors["z"])
        return {}

    def aggregate(self, weights: Tensor, update: RoundUpdate, eta_g: float) -> None:
        """``z += η_g mean(z_i − z)``, and the weights follow."""
        z = self.vectors["z"].add_(update.mean_delta, alpha=eta_g)
        self.numbers["path"] += eta_g * self._path
        weights.copy_(soft_threshold(z, self.numbers["path"] * self.l1))
