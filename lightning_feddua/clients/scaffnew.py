from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate
    from lightning_feddua.servers import Server


class Scaffnew(LocalTraining):
    """ProxSkip for federated averaging: steps ``x −= γ (g − h_i)``, random communication (Mishchenko et al., 2022).

    After each local step all clients communicate with probability p, so the number of steps in a round is geometric and
    the same for all clients. Then ``h_i += (p/γ) (x̄ − x̂_i)``, where ``x̄`` is the mean of the clients' ``x̂_i`` and γ the
    local learning rate. All clients take part in each round, and the server averages.

    Args:
        probability: p; by default ``1 / local_steps``, for as many local steps on average.
    """

    client_state = ("h_i",)
    client_adaptive = True
    needs_constant_lr = True
    needs_all_clients = True
    needs_local_steps = True

    def __init__(self, probability: float | None = None) -> None:
        super().__init__()
        if probability is not None and not 0 < probability <= 1:
            raise ConfigurationError(f"`probability={probability}` lies outside (0, 1].", "Choose a value inside.")
        self.probability = probability

    def check_server(self, server: Server) -> None:
        """The new weights must be the mean of the clients' weights."""
        if not server.averages:
            raise ConfigurationError(
                f"`Scaffnew` averages the clients' weights, and `{type(server).__name__}` does something else.",
                "Use `FedAvg` with `eta_g=1.0`.",
            )

    def set_up(self, weights: Tensor, population: int, local_steps: int | None) -> None:
        """All ``h_i = 0``."""
        assert local_steps is not None
        self._p = 1 / local_steps if self.probability is None else self.probability
        # What clients add to h_i after a round is the same for all: it is kept here once.
        self.vectors = {"shift": torch.zeros_like(weights)}

    def local_steps(self, rng: np.random.Generator, local_steps: int | None) -> int:
        """Geometric."""
        return int(rng.geometric(self._p))

    def begin_round(self, lr: float, mean_gradient: Tensor | None) -> None:
        """``p/γ`` of the round."""
        self._scale = self._p / lr

    def start(self, local: LocalRound) -> None:
        """``h_i``, the same for all steps of the round."""
        local.scratch["h"] = local.state["h_i"] + self.vectors["shift"]

    def correct(self, gradient: Tensor, weights: Tensor, local: LocalRound) -> None:
        """``g − h_i``."""
        gradient.sub_(local.scratch["h"])

    def finish(self, delta: Tensor, local: LocalRound) -> dict[str, Tensor]:
        """The client's own part of ``h_i += (p/γ) (x̄ − x̂_i)``, which is ``(p/γ) (Δ̄ − Δ_i)``."""
        local.state["h_i"].sub_(delta, alpha=self._scale)
        return {}

    def aggregate(self, weights: Tensor, update: RoundUpdate, eta_g: float) -> None:
        """The part that all clients share."""
        self.vectors["shift"].add_(update.mean_delta, alpha=self._scale)
