"""Sums whose bits do not depend on the ranks, for any cohort, any number of lanes and any split."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_feddua.reduction import LaneSums
from lightning_feddua.sampling import deal_lanes

costs = st.lists(st.integers(1, 50), max_size=30)


def reduced(vectors, costs, lanes, world_size, order):
    """What all ranks together make of a cohort's vectors; `order` is that in which the all-reduce adds the ranks."""
    buffers, sums = [], []
    parts = (2, vectors.shape[1] - 2)
    hands, first_half = deal_lanes(costs, lanes, world_size)
    for rank, hand in enumerate(hands):
        # On some ranks in memory that is lent, with anything in it.
        sums.append(LaneSums(lanes, world_size, spare=torch.full((2,), torch.nan) if rank == 0 else None))
        buffers.append(torch.zeros(sums[-1].windows, vectors.shape[1]))
        sums[-1].start(buffers[-1], parts, first_half)
        for position, lane in hand:
            for part, own in zip(sums[-1].lane(lane), vectors[position].split(parts), strict=True):
                part.add_(own)
        sums[-1].close()
    total = torch.zeros_like(buffers[0])
    for rank in order:
        total.add_(buffers[rank])
    buffers[0].copy_(total)
    return torch.cat(list(sums[0].total()))


@settings(deadline=None)
@given(costs, st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31), st.data())
def test_any_split_over_ranks_gives_the_same_bits(costs, lanes, world_size, seed, data):
    # As in a loop, each rank needs a lane; and a single rank has as many lanes as the others had.
    world_size = min(world_size, lanes)
    rng = np.random.default_rng(seed)
    # Over many orders of magnitude, so that another order of summation shows.
    vectors = torch.from_numpy(rng.normal(size=(len(costs), 5)) * 10.0 ** rng.integers(-6, 6, (len(costs), 1))).float()
    order = data.draw(st.permutations(range(world_size)))
    found = reduced(vectors, costs, lanes, world_size, order)
    assert torch.equal(found, reduced(vectors, costs, lanes, 1, [0]))
    np.testing.assert_allclose(found, vectors.double().sum(dim=0), rtol=1e-3, atol=1e-3 * (1 + vectors.abs().sum()))


def test_without_lanes_the_split_shows():
    rng = np.random.default_rng(0)
    vectors = torch.from_numpy(rng.normal(size=(20, 1000))).float()
    assert not torch.equal(reduced(vectors, [1] * 20, None, 2, [0, 1]), reduced(vectors, [1] * 20, None, 1, [0]))
