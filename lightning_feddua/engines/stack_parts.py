"""Which clients of a stack take a step together: those whose minibatches have the same shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from lightning_feddua.engines.base import LocalWork

# Below so many clients, steps one by one are faster than a vmapped one.
FEWEST_TOGETHER = 4
# By how much a slice of the stack may exceed the clients that step together. The others in it are computed in vain,
# which is faster than copying out the weights of those that count.
_LONGEST_SPAN = 1.25


@dataclass(frozen=True)
class Part:
    """Clients of a stack whose next minibatches have the same shape.

    Args:
        rows: their places in the stack.
        taken: what is computed: a slice of the stack or a list of places, in one vmapped step; or a single client,
            without a first axis.
    """

    rows: tuple[int, ...]
    taken: slice | list[int] | int

    @property
    def alone(self) -> bool:
        """Whether it is a single client's step, which is not vmapped."""
        return isinstance(self.taken, int)

    @property
    def places(self) -> list[int]:
        """The places of all that is computed, in order; also of clients that another part computes."""
        if isinstance(self.taken, slice):
            return list(range(self.taken.start, self.taken.stop))
        return [self.taken] if isinstance(self.taken, int) else self.taken

    def covers(self, size: int) -> bool:
        """Whether all clients of a stack of this size are computed."""
        return self.taken == slice(0, size)


class PartBatch(NamedTuple):
    """Clients of a stack that step together, and their stacked minibatch."""

    part: Part
    batch: Any


class StackPlan(NamedTuple):
    """What the clients of a stack do in a round, as far as it decides what can be stacked.

    Args:
        sizes: the number of samples of each client, in the order of the stack.
        work: how much each client does.
        fewest: how many clients it takes for a vmapped step.
    """

    sizes: tuple[int, ...]
    work: LocalWork
    fewest: int

    def steps(self) -> Iterator[tuple[tuple[int, ...], list[Part]]]:
        """The sizes of the minibatches of those that still train, and their parts, step by step."""
        remaining = [self.work.minibatch_sizes(size) for size in self.sizes]
        for step in range(max(map(len, remaining), default=0)):
            samples = tuple(sizes[step] for sizes in remaining if step < len(sizes))
            yield samples, parts(samples, self.fewest)


@lru_cache(maxsize=1024)
def _split(samples: tuple[int, ...], fewest: int) -> tuple[Part, ...]:
    groups: dict[int, list[int]] = {}
    for row, size in enumerate(samples):
        groups.setdefault(size, []).append(row)
    found: list[Part] = []
    for rows in sorted(groups.values(), key=len, reverse=True):
        start, stop = rows[0], rows[-1] + 1
        # Only the first may compute clients of others, which come later and overwrite what it has found for them.
        longest = len(rows) * (1.0 if found else _LONGEST_SPAN)
        if len(rows) < fewest:
            found += [Part((row,), row) for row in rows]
        else:
            found.append(Part(tuple(rows), slice(start, stop) if stop - start <= longest else rows))
    return tuple(found)


def parts(samples: Sequence[int], fewest: int) -> list[Part]:
    """Split the clients of a stack by the shapes of their next minibatches, most clients first.

    What a later part finds for a client replaces what an earlier one has found for it.

    Args:
        samples: the size of each one's minibatch.
        fewest: how many clients it takes for a vmapped step.

    >>> [part.taken for part in parts([20, 20, 7, 20, 20], fewest=4)]
    [slice(0, 5, None), 2]
    """
    return list(_split(tuple(samples), fewest))


def merged(parts: Sequence[Part], values: Sequence[Tensor], size: int, in_place: bool = False) -> Tensor:
    """The values of all clients of a stack, a row each.

    Args:
        parts: the parts of the stack.
        values: what each has found.
        size: the number of clients.
        in_place: whether the first part's value may be written to.
    """
    first = values[0]
    if len(parts) == 1 and parts[0].covers(size):
        return first
    if size == 1:
        return first[None]
    if in_place and parts[0].covers(size) and first.is_contiguous():
        whole, others = first, 1
    else:
        whole, others = first.new_empty(size, *first.shape[0 if parts[0].alone else 1 :]), 0
    for part, value in zip(parts[others:], values[others:], strict=True):
        whole[part.taken] = value
    return whole
