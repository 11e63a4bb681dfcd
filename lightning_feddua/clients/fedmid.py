"""FedMid: mirror descent with an L1 penalty (Yuan et al., 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lightning_feddua.checks import check_non_negative
from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate
    from lightning_feddua.servers import Server


class FedMid(LocalTraining):
    """Federated mirror descent on ``F(w) + λ ‖w‖₁``: a proximal step after each local step, and after the mean.

    Averaging undoes the sparsity of the clients' weights, as FedDualAvg's authors point out.

    Args:
        l1: λ, the strength of the penalty.
    """

    needs_constant_lr = True
    needs_local_steps = True

    def __init__(self, l1: float) -> None:
        super().__init__()
        check_non_negative("l1", l1, "one, such as 0.01")
        self.l1 = l1

    def check_server(self, server: Server) -> None:
        """The penalty of a round is in proportion to the server's step, which must be known."""
        if server.mean_step is None:
            raise ConfigurationError(
                f"`{type(self).__name__}` needs a constant server step along the mean update, unlike"
                f" `{type(server).__name__}`'s.",
                "Use `FedAvg`, with any `eta_g`.",
            )

    def set_up(self, weights: Tensor, population: int, local_steps: int | None) -> None:
        """Only the number of steps is needed."""
        assert local_steps is not None
        self._steps = local_steps

    def begin_round(self, lr: float, mean_gradient: Tensor | None) -> None:
        """``η_l τ`` of the round."""
        self._path = lr * self._steps

    def project(self, weights: Tensor, local: LocalRound) -> None:
        """``w = prox_{η_l λ}(w)``."""
        weights.copy_(soft_threshold(weights, local.lr * self.l1))

    def aggregate(self, weights: Tensor, update: RoundUpdate, eta_g: float) -> None:
        """``w = prox_{η_g η_l τ λ}(w)``."""
        weights.copy_(soft_threshold(weights, eta_g * self._path * self.l1))


def soft_threshold(vector: Tensor, threshold: float | Tensor) -> Tensor:
    """``prox`` of the L1 norm; unlike torch's ``softshrink``, it takes a threshold that is a tensor.

    >>> import torch
    >>> soft_threshold(torch.tensor([-3.0, 0.5, 2.0]), 1.0)
    tensor([-2.,  0.,  1.])
    """
    return vector - vector.clamp(-threshold, threshold)  # type: ignore[arg-type]
