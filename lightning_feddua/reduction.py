"""From the clients of a rank to the update of a round: one flat buffer, one all-reduce."""

import math
from dataclasses import dataclass, field

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_feddua.clients.engine import ClientUpdate
from lightning_feddua.parameters import ModuleBuffers, scalar_dtype, squared_norm
from lightning_feddua.table import Table, all_reduce_sum, means, pack, packed_size, unpack

# The table's column of ‖Δ_i‖²; no metric can have this name.
_SQUARED_NORM = "‖Δ‖²"


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
    """

    mean_delta: Tensor
    squared_norms: Tensor
    client_weights: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    float_buffers: Tensor | None = None
    float_changed: Tensor | None = None
    integer_buffers: Tensor | None = None

    def half_mean_squared_norm(self) -> float:
        """``½ Σ p_i ‖Δ_i‖²`` with the same weights ``p_i`` as in ``Δ̄``, or the step's guarantee breaks."""
        norms = self.squared_norms.to(scalar_dtype(self.squared_norms.device))
        if self.client_weights is None:
            return 0.5 * norms.mean().item()
        weights = self.client_weights.to(norms)
        return 0.5 * ((weights * norms).sum() / weights.sum()).item()

    def heterogeneity(self) -> float:
        """``Σ p_i ‖Δ_i‖² / ‖Δ̄‖²``: 1 where all clients agree, and larger the more their updates cancel in the mean.

        >>> deltas = torch.eye(4)
        >>> RoundUpdate(deltas.mean(0), deltas.square().sum(1)).heterogeneity()
        4.0
        """
        norm = squared_norm(self.mean_delta).item()
        return 2 * self.half_mean_squared_norm() / norm if norm > 0 else math.nan


class Reduction:
    """Streaming sums of one rank's clients, completed over all ranks by a single all-reduce.

    The buffer holds, in this order, the weighted sum of the updates; the sums of float buffers and how many clients
    changed them; a slot for each rank's integer buffers; the table of the clients' squared norms and metrics.

    Args:
        fabric: for the collective.
        size: the number of trainable parameters.
        dtype: the dtype of the sums, at least float32.
        buffers: the module's buffers, averaged alongside.
    """

    def __init__(self, fabric: Fabric, size: int, dtype: torch.dtype, buffers: ModuleBuffers) -> None:
        self._fabric = fabric
        self._size = size
        self._buffers = buffers
        self._table = Table(fabric, [_SQUARED_NORM])
        self._buffer = torch.zeros(0, dtype=dtype, device=fabric.device)

    def start(self, cohort_size: int) -> None:
        """Begin a round: all sums at zero."""
        dtype = self._buffer.dtype
        # A rank's slot ends with the word that it trained anybody.
        slots = (self._fabric.world_size, self._buffers.integer_count + 1, packed_size(dtype))
        sizes = [self._size, 2 * self._buffers.float_count, math.prod(slots), self._table.size(cohort_size, dtype)]
        if self._buffer.numel() == sum(sizes):
            self._buffer.zero_()
        else:
            self._buffer = self._buffer.new_zeros(sum(sizes))
        self._delta_sum, floats, integers, self._rows = self._buffer.split(sizes)
        self._float_sum, self._float_changed = floats.view(2, -1)
        self._integer_slots = integers.view(slots)
        self._integer_maximum: Tensor | None = None
        self._table.start()

    def add(self, update: ClientUpdate, global_floats: Tensor | None = None) -> None:
        """Add one trained client. Nothing is kept of its update but the sum and the norm.

        Args:
            update: what the client gives.
            global_floats: the float buffers that it started from.
        """
        weight = update.client.weight
        self._delta_sum.add_(update.delta, alpha=weight)
        row = {name: (value, weight) for name, value in update.metrics.items()}
        self._table.add(update.client.position, {_SQUARED_NORM: (squared_norm(update.delta), weight), **row})
        if global_floats is not None and update.floats is not None:
            self._float_sum.add_(update.floats, alpha=weight)
            self._float_changed.add_(update.floats != global_floats)
        if update.integers is not None:
            known = self._integer_maximum
            self._integer_maximum = update.integers if known is None else torch.maximum(known, update.integers)

    def all_reduce(self) -> RoundUpdate:
        """Complete the sums over all ranks. Every rank calls this once a round, with or without a client.

        The mean update is a window on the buffer: it holds until the next round starts.
        """
        self._table.write(self._rows)
        if self._integer_maximum is not None:
            slot = torch.nn.functional.pad(self._integer_maximum, (0, 1), value=1)
            self._integer_slots[self._fabric.global_rank] = pack(slot, self._buffer.dtype)
        all_reduce_sum(self._fabric, self._buffer)

        columns = self._table.read(self._rows)
        norms, weights = columns.pop(_SQUARED_NORM)
        total = float(weights.sum())
        if total > 0:
            self._delta_sum.div_(total)
        return RoundUpdate(
            mean_delta=self._delta_sum,
            squared_norms=torch.from_numpy(norms[weights > 0]),
            client_weights=torch.from_numpy(weights[weights > 0]),
            metrics=means(columns),
            float_buffers=self._float_sum / total if self._buffers.float_count and total > 0 else None,
            float_changed=self._float_changed > 0 if self._buffers.float_count else None,
            integer_buffers=self._maximum_integers(),
        )

    def _maximum_integers(self) -> Tensor | None:
        if not self._buffers.integer_count:
            return None
        slots = unpack(self._integer_slots).to(torch.int64)
        slots = slots[slots[:, -1] == 1, :-1]
        return slots.amax(dim=0) if len(slots) else None
