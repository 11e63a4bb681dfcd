"""What a client sends, and what the server learns from one round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_feddua._private import version_of
from lightning_feddua.vectors import scalar_dtype, squared_norm

if TYPE_CHECKING:
    from lightning_feddua.engines.base import Client


@dataclass
class ClientUpdate:
    """What a trained client gives to the reduction. Tensors hold until the next one is asked for.

    Args:
        client: who.
        delta: its update ``Δ_i``, flat.
        metrics: its training metrics, scalars.
        floats: its float buffers, flat, or None.
        integers: its integer buffers, flat, or None.
        extra_vectors: what its algorithm sends along.
        kept: the vectors that it keeps for its next round, or None.
        scalars: the numbers that its algorithm sends along.
        flaw: what of it is not finite, as :func:`~lightning_feddua.aggregation.finite.flaw_of` has it, where somebody
            is still to look at that.
    """

    client: Client
    delta: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    floats: Tensor | None = None
    integers: Tensor | None = None
    extra_vectors: dict[str, Tensor] = field(default_factory=dict)
    kept: Tensor | None = None
    scalars: dict[str, Tensor] = field(default_factory=dict)
    flaw: Tensor | None = None


class SoleWeights:
    """The weights of a round's only client. ``w + (w_i − w)`` is ``w_i`` but for its last bits.

    Args:
        weights: its weights.
        mean_delta: its update, for which they stand as long as nobody changes that.
    """

    def __init__(self, weights: Tensor, mean_delta: Tensor) -> None:
        self._weights = weights
        self._mean_delta, self._as_made = mean_delta, version_of(mean_delta)

    def of(self, update: RoundUpdate) -> Tensor | None:
        """The weights, if the update is still that of the client."""
        same = update.mean_delta is self._mean_delta and version_of(self._mean_delta) == self._as_made
        return self._weights if same else None


@dataclass
class RoundUpdate:
    """What the server learns from one round.

    Args:
        mean_delta: ``Δ̄``, the (weighted) mean of the clients' updates, flat.
        squared_norms: ``‖Δ_i‖²`` of each client that took part, in cohort order.
        client_weights: the weight of each client in the mean, on any scale; None for uniform.
        metrics: training metrics, averaged over clients.
        float_buffers: the mean of the clients' float buffers, flat; None without any.
        float_changed: which float buffers any client changed.
        integer_buffers: the maximum of the clients' integer buffers, flat; None without any.
        extra_vectors: the plain mean of what the clients' algorithm sends along, by name.
        scalars: the numbers that the clients' algorithm sends along, by name: one for each client that took part.
        spare: memory like the mean update's, with anything in it, for a server to compute in; None without any.
        client_rows: of each place in the cohort, the training metrics by name and the number of ``samples`` (-1 if
            unknown); None for a client that was left out. Empty where a backend does not tell.
        sole_weights: the weights of the only client, where plain averaging takes them; None otherwise.
    """

    mean_delta: Tensor
    squared_norms: Tensor
    client_weights: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    float_buffers: Tensor | None = None
    float_changed: Tensor | None = None
    integer_buffers: Tensor | None = None
    extra_vectors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    spare: Tensor | None = None
    client_rows: list[dict[str, float] | None] = field(default_factory=list)
    sole_weights: SoleWeights | None = None
    _norm: tuple[Tensor, int, float] | None = field(default=None, init=False, repr=False)

    @property
    def clients(self) -> int:
        """How many clients took part."""
        return len(self.squared_norms)

    def half_mean_squared_norm(self) -> float:
        """``½ Σ p_i ‖Δ_i‖²`` with the same weights ``p_i`` as in ``Δ̄``, or the step's guarantee breaks."""
        norms = self.squared_norms.to(scalar_dtype(self.squared_norms.device))
        if self.client_weights is None:
            return 0.5 * norms.mean().item()
        weights = self.client_weights.to(norms)
        return 0.5 * ((weights * norms).sum() / weights.sum()).item()

    def heterogeneity(self) -> float:
        """``Σ p_i ‖Δ_i‖² / ‖Δ̄‖²``: 1 where all clients agree, and larger the more their updates cancel in the mean.

        >>> import torch
        >>> deltas = torch.eye(4)
        >>> RoundUpdate(deltas.mean(0), deltas.square().sum(1)).heterogeneity()
        4.0
        """
        norm = self._mean_squared_norm()
        return 2 * self.half_mean_squared_norm() / norm if norm > 0 else math.nan

    @property
    def mean_delta_is_finite(self) -> bool:
        """Whether ``Δ̄`` is."""
        return math.isfinite(self._mean_squared_norm())

    def _mean_squared_norm(self) -> float:
        """``‖Δ̄‖²``, computed again only where the mean update has changed."""
        delta = self.mean_delta
        if self._norm is None or self._norm[0] is not delta or self._norm[1] != version_of(delta):
            self._norm = delta, version_of(delta), squared_norm(delta).item()
        return self._norm[2]
