"""From the clients of a rank to the update of a round."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_feddua.aggregation.dealing import LaneDeal
from lightning_feddua.aggregation.lanes import LaneSums
from lightning_feddua.aggregation.metric_rows import Columns, Table, means, pack, packed_size, unpack
from lightning_feddua.aggregation.update import ClientUpdate, RoundUpdate
from lightning_feddua.aggregation.workspace import Workspace
from lightning_feddua.host.buffers import ModuleBuffers
from lightning_feddua.vectors import squared_norm

# The table's column of ‖Δ_i‖²; no metric can have this name.
_SQUARED_NORM = "‖Δ‖²"
# The columns of clients' scalars begin like this; nor can a metric be called so.
_SCALAR = "‖"
# The column of the number of samples.
_SAMPLES = "‖‖samples"
# That of what is not finite in a client, besides its update.
_FLAW = "‖‖flaw"


class Reduction:
    """Streaming sums of one rank's clients, completed over all ranks once per round.

    Summed in lanes are the weighted updates, the vectors that clients send along, the float buffers, and how many
    clients changed those. The tail has a slot for each rank's integer buffers; the table of the clients' squared norms
    and metrics; how many ranks want to stop, and how many have failed.

    Args:
        fabric: for the collective.
        size: the number of trainable parameters.
        dtype: the dtype of the sums, at least float32.
        buffers: the module's buffers, averaged alongside.
        extra_vectors: names of further vectors of the same size that clients send.
        scalars: names of numbers that clients send.
        lanes: see :class:`LaneSums`.
        workspace: likewise.
    """

    def __init__(
        self,
        fabric: Fabric,
        size: int,
        dtype: torch.dtype,
        buffers: ModuleBuffers,
        extra_vectors: Sequence[str] = (),
        scalars: Sequence[str] = (),
        lanes: int | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self._fabric = fabric
        self._size = size
        self._buffers = buffers
        self._extra_names = tuple(extra_vectors)
        self._dtype = dtype
        self._scalars = {name: f"{_SCALAR}{name}" for name in scalars}
        self._lanes = LaneSums(fabric, dtype, lanes, workspace)
        # The lane that clients are added to at present, and the windows of its parts.
        self._lane: int | None = None
        self._sums: Sequence[Tensor] = ()
        self._table = Table(fabric, [_SQUARED_NORM, _SAMPLES, *self._scalars.values()])
        self.stop = self.failed = False
        # By place in the cohort.
        self.flaws: dict[int, float] = {}

    def start(self, cohort_size: int, deal: LaneDeal) -> None:
        """Begin a round: all sums at zero.

        Args:
            cohort_size: the number of clients of all ranks.
            deal: how they are dealt to ranks.
        """
        # Of one lane: updates, extra vectors, float buffers and their counts.
        parts = [self._size] * (1 + len(self._extra_names)) + [self._buffers.float_count] * 2
        # A rank's slot ends with the word that it trained anybody.
        slots = (self._fabric.world_size, self._buffers.integer_count + 1, packed_size(self._dtype))
        sizes = [math.prod(slots), self._table.size(cohort_size, self._dtype), 2]
        # No window on the old buffer, which may be replaced: there are never two.
        self._sums = ()
        self._integer_slots = self._rows = self._votes = torch.empty(0)
        integers, self._rows, self._votes = self._lanes.start(parts, sum(sizes), deal).split(sizes)
        self._lane = None
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
        if update.client.lane != self._lane:
            self._lane, self._sums = update.client.lane, self._lanes.lane(update.client.lane)
        delta_sum, *extra_sums, float_sum, float_changed = self._sums
        delta_sum.add_(update.delta, alpha=weight)
        for name, extra_sum in zip(self._extra_names, extra_sums, strict=True):
            extra_sum.add_(update.extra_vectors[name])
        row = {name: (value, weight) for name, value in update.metrics.items()}
        row |= {column: (update.scalars[name], 1.0) for name, column in self._scalars.items()}
        row[_SAMPLES] = (torch.tensor(float(update.client.data.samples)), 1.0)
        if update.flaw is not None:
            row[_FLAW] = (update.flaw, 1.0)
        self._table.add(update.client.position, {_SQUARED_NORM: (squared_norm(update.delta), weight), **row})
        if global_floats is not None and update.floats is not None:
            float_sum.add_(update.floats, alpha=weight)
            float_changed.add_(update.floats != global_floats)
        if update.integers is not None:
            known = self._integer_maximum
            self._integer_maximum = update.integers if known is None else torch.maximum(known, update.integers)

    def all_reduce(self, stop: bool = False, failed: bool = False) -> RoundUpdate:
        """Complete the sums over all ranks. Every rank calls this once per round, with or without a client.

        The mean update and the extra vectors are windows on the buffer: they hold until the next round starts.

        Args:
            stop: whether this rank wants the run to end after this round. ``self.stop`` then says, on every rank, that
                one of them does.
            failed: whether it has an error to raise; likewise ``self.failed``.
        """
        self._votes.copy_(self._votes.new_tensor([stop, failed]))
        self._table.write(self._rows)
        if self._integer_maximum is not None:
            slot = torch.nn.functional.pad(self._integer_maximum, (0, 1), value=1)
            self._integer_slots[self._fabric.global_rank] = pack(slot, self._dtype)
        mean_delta, *extra_vectors, float_sum, float_changed = self._lanes.complete()
        self.stop, self.failed = (self._votes > 0).tolist()

        columns = self._table.read(self._rows)
        norms, weights = columns.pop(_SQUARED_NORM)
        samples = columns.pop(_SAMPLES)[0]
        flaws = columns.pop(_FLAW, (np.zeros(0), None))[0]
        self.flaws = {int(place): float(flaws[place]) for place in flaws.nonzero()[0]}
        took_part = weights > 0
        scalars = {name: torch.from_numpy(columns.pop(key)[0][took_part]) for name, key in self._scalars.items()}
        total = float(weights.sum())
        if total > 0:
            mean_delta.div_(total)
        for vector in extra_vectors:
            vector.div_(max(1, int((weights > 0).sum())))
        return RoundUpdate(
            mean_delta=mean_delta,
            squared_norms=torch.from_numpy(norms[weights > 0]),
            client_weights=torch.from_numpy(weights[weights > 0]),
            metrics=means(columns),
            float_buffers=float_sum / total if self._buffers.float_count and total > 0 else None,
            float_changed=float_changed > 0 if self._buffers.float_count else None,
            integer_buffers=self._maximum_integers(),
            extra_vectors=dict(zip(self._extra_names, extra_vectors, strict=True)),
            scalars=scalars,
            spare=self._lanes.spare(),
            client_rows=client_rows(columns, samples, took_part),
        )

    def _maximum_integers(self) -> Tensor | None:
        if not self._buffers.integer_count:
            return None
        slots = unpack(self._integer_slots).to(torch.int64)
        slots = slots[slots[:, -1] == 1, :-1]
        return slots.amax(dim=0) if len(slots) else None


def client_rows(columns: Columns, samples: np.ndarray, took_part: np.ndarray) -> list[dict[str, float] | None]:
    """What each client of a cohort has logged, and its number of samples; None for one that did not take part."""
    names = sorted(columns)
    return [
        {"samples": int(samples[i])} | {name: float(columns[name][0][i]) for name in names if columns[name][1][i] > 0}
        if took_part[i]
        else None
        for i in range(len(took_part))
    ]


def mean_vector(
    fabric: Fabric, vectors: Iterable[tuple[Tensor, float, int]], like: Tensor, lanes: int | None, deal: LaneDeal
) -> Tensor:
    """The weighted mean of vectors of which each rank has some, each with its weight and its lane; a collective."""
    sums = LaneSums(fabric, like.dtype, lanes)
    sums.start((like.numel(), 1), 0, deal)
    for vector, weight, lane in vectors:
        vector_sum, weight_sum = sums.lane(lane)
        vector_sum.add_(vector, alpha=weight)
        weight_sum += weight
    vector_sum, weight_sum = sums.complete()
    # Zero where nobody has one.
    return vector_sum.div_(weight_sum.clamp(min=torch.finfo(like.dtype).tiny))
