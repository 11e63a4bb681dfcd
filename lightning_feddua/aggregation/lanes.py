"""Sums over clients and ranks, with bits that depend on neither the number of ranks nor on who trains whom."""

from collections.abc import Mapping, Sequence

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_feddua._private import add_all, zero_all
from lightning_feddua.aggregation.collectives import all_gather, all_reduce_sum, all_to_all
from lightning_feddua.aggregation.dealing import LaneDeal
from lightning_feddua.aggregation.workspace import Workspace

# Up to how many numbers the lanes of more than two ranks are all reduced at once: for few, one collective is fastest.
_AT_ONCE = 1 << 19
# Where there are more, a vector is exchanged in pieces of at least so many numbers, and in so many pieces at most.
_PIECE = 1 << 18
_PIECES = 64
_BORROWER = "the sums of lanes"


class LaneSums:
    """Sums of vectors in parts, and of a tail of numbers that any order gives the same sum of.

    Floats summed in another order give other bits. So each vector belongs to a lane, which the cohort alone decides; a
    lane is summed on one rank, in order; the lanes of each half are summed in order, and then the halves. Ranks do this
    in one of three ways:

    - One rank, or two of which each has a half, add a lane to its half as soon as it is complete. Two halves may be
      added in either order, so an all-reduce of one vector does it.
    - More ranks reduce a window for each lane, in which the others have zeros, all at once where vectors are short.
    - Where they are long, each rank keeps its lanes apart. An all-to-all gives it a segment of everybody's, which it
      sums, and an all-gather hands the sums round. That is the traffic of an all-reduce where each rank has one lane,
      and half as much again for each lane more. Each takes a vector: two are there in any case, and one is lent.

    Args:
        fabric: for the collectives.
        dtype: of the sums.
        lanes: the number of lanes; None for a sum in whatever order is fastest.
        workspace: lends memory of the first part's length from :meth:`start` to :meth:`complete`; its own if left out.
    """

    def __init__(
        self, fabric: Fabric, dtype: torch.dtype, lanes: int | None, workspace: Workspace | None = None
    ) -> None:
        self._fabric = fabric
        self._lanes = lanes
        self._workspace = workspace
        self._halves = lanes is not None and fabric.world_size <= 2
        self._none = self._buffer = self._second = torch.zeros(0, dtype=dtype, device=fabric.device)
        # Where this rank sums each lane, in parts, but for halves.
        self._sums: Mapping[int, Sequence[Tensor]] = {}
        # Memory for further lanes than the first two, in parts.
        self._further: list[list[Tensor]] = []

    def start(self, parts: Sequence[int], tail: int, deal: LaneDeal) -> Tensor:
        """Begin with zeros.

        Args:
            parts: the lengths of a vector's parts, the same each time.
            tail: the length of the tail.
            deal: which rank has which lanes.

        Returns:
            The tail, to be written to.
        """
        self._parts = list(parts)
        self._first_half = deal.first_half
        self._hands = [sorted({lane for _, lane in hand}) for hand in deal.hands]
        self._open: int | None = None
        # What a round that failed has not given back.
        self._give_back()
        size = sum(parts)
        lanes = self._lanes or 0
        many = lanes > 0 and not self._halves
        shared = lanes if many and lanes * size <= _AT_ONCE else 0
        self._apart = many and not shared
        own = self._hands[self._fabric.global_rank]
        # Of more lanes than these in another round.
        del self._further[max(1, len(own) - 2) :]
        sizes = [size, shared * size, tail]
        self._make_vectors(sum(sizes), size if lanes else 0)
        self._first, windows, numbers = self._buffer.split(sizes)
        self._windows = windows.view(shared, size)
        self._reduced = self._buffer[size if many else 0 :]
        if shared:
            self._sums = {lane: self._windows[lane].split(self._parts) for lane in range(shared)}
        elif many:
            self._sums = {lane: self._window(place) for place, lane in enumerate(own)}
        else:
            self._sums = {0: self._first.split(self._parts)}
        return numbers

    def lane(self, lane: int) -> Sequence[Tensor]:
        """Where the parts of a lane are summed. A rank asks for one lane after another."""
        if not self._halves:
            return self._sums[lane]
        if lane != self._open:
            self._close()
            self._open = lane
            return self._window(2)
        return self._further[0]

    def complete(self) -> Sequence[Tensor]:
        """Complete the sums over all lanes and ranks, and that of the tail.

        Returns:
            The parts. They hold until the next start.
        """
        self._close()
        if len(self._reduced):
            all_reduce_sum(self._fabric, self._reduced)
        if self._apart:
            self._exchange()
        elif len(self._windows):
            self._add_up({lane: self._windows[lane] for hand in self._hands for lane in hand}, self._first)
        elif self._halves and self._fabric.world_size == 1:
            self._first.add_(self._second)
        self._give_back()
        return self._first.split(self._parts)

    def spare(self) -> Tensor | None:
        """Memory of the first part's length that :meth:`complete` has done with; None without lanes."""
        return None if self._lanes is None else self._second[: self._parts[0]]

    def _give_back(self) -> None:
        if self._workspace is not None:
            for window in self._further[:1]:
                window[0] = self._none
            self._workspace.give_back(_BORROWER)

    def _make_vectors(self, buffer: int, second: int) -> None:
        """The buffer and a second vector, at zero."""
        # No window on the old ones, so that there are never two.
        self._first = self._windows = self._reduced = self._none
        self._sums = {}
        if len(self._buffer) == buffer:
            self._buffer.zero_()
        else:
            self._buffer = self._none
            self._buffer = self._none.new_zeros(buffer)
        self._second = self._second.zero_() if len(self._second) == second else self._none.new_zeros(second)

    def _window(self, place: int) -> Sequence[Tensor]:
        """The parts of one of this rank's own vectors, at zero."""
        if place < 2:
            return (self._first, self._second)[place].split(self._parts)
        borrows = place == 2 and self._workspace is not None
        if len(self._further) <= place - 2:
            self._further.append([self._none.new_empty(0 if borrows else self._parts[0])])
            self._further[-1] += [self._none.new_empty(size) for size in self._parts[1:]]
        window = self._further[place - 2]
        if borrows and not len(window[0]):
            window[0] = self._workspace.lend(_BORROWER)  # type: ignore[union-attr]
        zero_all(window)
        return window

    def _close(self) -> None:
        """Add a lane that is complete to its half."""
        if self._open is not None:
            alone = self._fabric.world_size == 1
            half = self._second if alone and self._open >= self._first_half else self._first
            add_all(half.split(self._parts), self._further[0])
            self._open = None

    def _add_up(self, lanes: Mapping[int, Tensor], total: Tensor) -> None:
        """Write the sum of all lanes, which are changed."""
        total.zero_()
        for first in (True, False):
            half = [lanes[lane] for lane in sorted(lanes) if (lane < self._first_half) == first]
            for other in half[1:]:
                half[0].add_(other)
            if half:
                total.add_(half[0])

    def _exchange(self) -> None:
        """Sum the lanes that ranks keep apart, a piece of the vectors at a time, into the first window."""
        rank, ranks = self._fabric.global_rank, self._fabric.world_size
        arriving = [lane for hand in self._hands for lane in hand]
        counts = [len(hand) for hand in self._hands]
        own = self._hands[rank]
        piece_size = max(_PIECE, -(-max(self._parts) // _PIECES))
        longest = -(-piece_size // ranks)
        memory = [self._none.new_zeros(rows * longest) for rows in (ranks * len(own), len(arriving), 1, ranks)]
        for part, target in enumerate(self._first.split(self._parts)):
            for start in range(0, len(target), piece_size):
                piece = target[start : start + piece_size]
                segment = -(-len(piece) // ranks)
                sent, arrived, total, gathered = (each[: len(each) // longest * segment] for each in memory)
                for place, lane in enumerate(own):
                    # What the last segment has beyond the piece is of no account.
                    gathered[: len(piece)] = self._sums[lane][part][start : start + piece_size]
                    sent.view(ranks, len(own), segment)[:, place] = gathered.view(ranks, segment)
                rows = arrived.view(-1, segment)
                all_to_all(self._fabric, rows, sent.view(-1, segment), counts)
                self._add_up(dict(zip(arriving, rows, strict=True)), total)
                all_gather(self._fabric, gathered, total)
                piece.copy_(gathered[: len(piece)])
