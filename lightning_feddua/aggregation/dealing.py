"""Which rank trains which clients of a cohort, and in which order updates are summed."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


def deal(costs: Sequence[float], world_size: int) -> list[list[int]]:
    """Split a cohort over ranks, longest first to whoever has least to do.

    Args:
        costs: the cost of each member of the cohort, in any unit.
        world_size: the number of ranks.

    Returns:
        For each rank the positions in the cohort that it trains, ascending.

    >>> deal([5, 1, 1, 1, 1, 1], world_size=2)
    [[0], [1, 2, 3, 4, 5]]
    """
    hands: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0.0, rank) for rank in range(world_size)]
    for position in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        hands[rank].append(position)
        heapq.heappush(loads, (load + costs[position], rank))
    return [sorted(hand) for hand in hands]


class LaneDeal(NamedTuple):
    """A cohort in lanes, dealt to ranks.

    Args:
        hands: for each rank the positions in the cohort that it trains, each with its lane, lane by lane and
            each half's lanes in order.
        first_half: how many lanes make the first half; two ranks have a half each.
    """

    hands: list[list[tuple[int, int]]]
    first_half: int


def deal_lanes(costs: Sequence[float], lanes: int | None, world_size: int) -> LaneDeal:
    """Split a cohort into lanes, in two halves, which depend on the cohort alone, and deal whole lanes to ranks.

    Args:
        costs: the cost of each member of the cohort, in any unit.
        lanes: the number of lanes; None to deal member by member, all in one lane.
        world_size: the number of ranks.

    >>> deal_lanes([1, 1, 1, 1, 1], lanes=4, world_size=2).hands
    [[(0, 0), (4, 0), (3, 1)], [(1, 2), (2, 3)]]
    """
    if lanes is None:
        return LaneDeal([[(position, 0) for position in hand] for hand in deal(costs, world_size)], 0)
    # In the order of their first members, so that few clients are trained in the cohort's order.
    members = sorted(deal(costs, lanes), key=lambda lane: lane[:1] or [len(costs)])
    lane_costs = [sum(costs[position] for position in lane) for lane in members]
    halves = deal(lane_costs, 2)
    number = {lane: place for place, lane in enumerate(halves[0] + halves[1])}
    hands = halves if world_size == 2 else deal(lane_costs, world_size)
    dealt = [[(position, number[lane]) for lane in hand for position in members[lane]] for hand in hands]
    return LaneDeal(dealt, len(halves[0]))
