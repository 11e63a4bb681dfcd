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


# How many more clients in a stack cost as much as a step of the stack does before its first client.
_START_OF_A_STEP = 4


def deal_stacks(steps: Sequence[int], world_size: int) -> list[list[int]]:
    """Split a cohort over ranks that train their clients together, such that the slowest rank is done early.

    A stack makes as many steps as its longest client, so that long clients belong together.

    Args:
        steps: the number of steps of each member of the cohort.
        world_size: the number of ranks.

    Returns:
        For each rank the positions in the cohort that it trains, ascending.

    >>> deal_stacks([40, 30, 30, 10, 10, 10, 10, 10, 10], world_size=2)
    [[0, 1], [2, 3, 4, 5, 6, 7, 8]]
    """
    if len(set(steps)) <= 1:
        return deal(steps, world_size)
    order = sorted(range(len(steps)), key=lambda i: (-steps[i], i))

    def split(bound: int) -> list[list[int]]:
        """As few hands as possible, none of which costs more; one client may."""
        hands: list[list[int]] = []
        cost = 0
        for position in order:
            cost += steps[position]
            if not hands or cost > bound:
                hands.append([])
                cost = (_START_OF_A_STEP + 1) * steps[position]
            hands[-1].append(position)
        return hands

    low, high = 0, (_START_OF_A_STEP + len(steps)) * steps[order[0]]
    while low < high:
        bound = (low + high) // 2
        low, high = (low, bound) if len(split(bound)) <= world_size else (bound + 1, high)
    hands = [sorted(hand) for hand in split(low)]
    hands += [[] for _ in range(world_size - len(hands))]

    def slowest(hands: list[list[int]]) -> int:
        own = [[steps[position] for position in hand] for hand in hands]
        return max(_START_OF_A_STEP * max(each, default=0) + sum(each) for each in own)

    # Among few clients there may be no good place to split.
    return min(hands, deal(steps, world_size), key=slowest)


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
