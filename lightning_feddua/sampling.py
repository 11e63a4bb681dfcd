"""Who takes part in a round, on which rank, and the seed of everything random.

Every draw is a function of (seed, round, client, purpose) and of nothing else: not of the rank, the world size, the
order of calls or the engine. Any number of workers, and a run that was interrupted, then see the same cohorts, the same
minibatches and the same dropout masks.
"""

import heapq
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a random draw is for; part of its seed, so that two uses never share a stream."""

    COHORT = 0
    MINIBATCHES = 1
    LOCAL_STEPS = 2
    EVALUATION = 3
    ROUND = 4
    DATA = 5
    SEARCH = 6


def generator(seed: int, round: int, client: int, purpose: Purpose) -> np.random.Generator:
    """The NumPy generator of one purpose, for one client in one round."""
    return np.random.default_rng([purpose, seed, round, client])


def sample_cohort(seed: int, round: int, population: int, size: int) -> list[int]:
    """Clients of a round: uniform without replacement, in ascending order.

    >>> sample_cohort(seed=0, round=3, population=10, size=10)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if size == population:
        return list(range(population))
    drawn = generator(seed, round, 0, Purpose.COHORT).choice(population, size, replace=False, shuffle=False)
    return np.sort(drawn).tolist()


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


def seed_generators(seed: int, round: int, index: int, purpose: Purpose, device: torch.device) -> None:
    """Seed the global generators (Python, NumPy, torch) for one client's local steps, or one batch of validation."""
    words = np.random.SeedSequence([purpose, seed, round, index]).generate_state(2)
    value = int(words[0]) << 32 | int(words[1])
    random.seed(value)
    np.random.seed(words[0])
    # Not `torch.manual_seed`: it formats a stack trace for the CUDA queue on every call.
    torch.default_generator.manual_seed(value)
    if device.type != "cpu":
        torch.get_device_module(device.type).manual_seed(value)


def random_state(device: torch.device) -> list[Tensor]:
    """The state of torch's generators that a step on a device draws from."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device.type).get_rng_state()]


def set_random_state(device: torch.device, states: list[Tensor]) -> None:
    """Go back to a state that :func:`random_state` gave."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device.type).set_rng_state(states[1])


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Leave the caller's global generators as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
