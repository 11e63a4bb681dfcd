from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightning_feddua.checks import check_choice
from lightning_feddua.clients.local_training import LocalRound, LocalTraining

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate


class Scaffold(LocalTraining):
    """SCAFFOLD: control variates take the drift out of local steps (Karimireddy et al., 2020).

    Each client keeps ``c_i`` and steps along ``g + c − c_i``; the server keeps their mean ``c``. It works with every
    server rule, including FedDuA's.

    Args:
        option: how a client renews ``c_i``: ``"II"``, from its own path, ``c_i − c − Δ_i / (τ η_l)``, at no cost;
            ``"I"``, the gradient of all its data at ``w_t``, which takes one more pass over the data.
    """

    client_state = ("c_i",)
    extra_vectors = ("c_i_change",)
    client_adaptive = True
    needs_constant_lr = True

    def __init__(self, option: Literal["I", "II"] = "II") -> None:
        super().__init__()
        check_choice("option", option, ("I", "II"))
        self.option = option
        self.needs_full_gradient = option == "I"

    def set_up(self, weights: Tensor, population: int, local_steps: int | None) -> None:
        """``c = 0``."""
        self.vectors = {"c": torch.zeros_like(weights)}
        self._population = population

    def start(self, local: LocalRound) -> None:
        """``c − c_i``, the same for all steps of the round."""
        local.scratch["correction"] = self.vectors["c"] - local.state["c_i"]

    def correct(self, gradient: Tensor, weights: Tensor, local: LocalRound) -> None:
        """``g + c − c_i``."""
        gradient.add_(local.scratch["correction"])

    def finish(self, delta: Tensor, local: LocalRound) -> dict[str, Tensor]:
        """Renew ``c_i``, and send its change to the server."""
        c_i = local.state["c_i"]
        if local.full_gradient is not None:
            change = local.full_gradient - c_i
        elif local.step == 0:
            change = torch.zeros_like(c_i)
        else:
            change = torch.add(-self.vectors["c"], delta, alpha=-1 / (local.step * local.lr))
        c_i.add_(change)
        return {"c_i_change": change}

    def aggregate(self, weights: Tensor, update: RoundUpdate, eta_g: float) -> None:
        """``c += (|S|/N) mean(c_i⁺ − c_i)``."""
        share = len(update.squared_norms) / self._population
        self.vectors["c"].add_(update.extra_vectors["c_i_change"], alpha=share)
