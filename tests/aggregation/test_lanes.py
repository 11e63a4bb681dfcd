"""Sums whose bits do not depend on the ranks, for any cohort, any number of lanes, any split and any exchange."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric

from lightning_feddua.aggregation import lanes as lane_sums
from lightning_feddua.aggregation.dealing import LaneDeal, deal_lanes
from lightning_feddua.aggregation.lanes import LaneSums
from lightning_feddua.aggregation.workspace import Workspace
from tests.forked_ranks import ForkedRanks

CASES = 40


def cohorts(seed):
    """Two cohorts, one after the other, as clients' vectors and costs."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(3, 40))
    for _ in range(2):
        costs = rng.integers(1, 50, rng.integers(0, 30)).tolist()
        # Over many orders of magnitude, so that another order of summation shows.
        vectors = rng.normal(size=(len(costs), size)) * 10.0 ** rng.integers(-6, 6, (len(costs), 1))
        yield torch.from_numpy(vectors).float().reshape(len(costs), size), costs


def number_of_lanes(seed):
    # As in a loop, each rank needs a lane.
    return int(np.random.default_rng([seed, 1]).integers(5, 11))


def summed(fabric, seed, lanes):
    """What all ranks together make of the cohorts."""
    # On some ranks in memory that is lent, with anything in it.
    workspace = Workspace(torch.empty(2))
    workspace.lend("the test").fill_(torch.nan)
    workspace.give_back("the test")
    sums = LaneSums(fabric, torch.float32, lanes, workspace if fabric.global_rank % 2 == 0 else None)
    totals = []
    for vectors, costs in cohorts(seed):
        deal = deal_lanes(costs, lanes, fabric.world_size)
        parts = (2, vectors.shape[1] - 2)
        tail = sums.start(parts, 3, deal)
        tail.fill_(fabric.global_rank + 1.0)
        for position, lane in deal.hands[fabric.global_rank]:
            for part, own in zip(sums.lane(lane), vectors[position].split(parts), strict=True):
                part.add_(own)
        reduced = sums.complete()
        if (spare := sums.spare()) is not None:
            # Whoever computes there does not disturb the sums.
            spare.fill_(torch.nan)
        totals.append(torch.cat(list(reduced)).clone())
        assert tail.tolist() == [fabric.world_size * (fabric.world_size + 1) / 2] * 3
    return totals


def of_all_cases(fabric):
    return [summed(fabric, seed, number_of_lanes(seed)) for seed in range(CASES)]


def in_ranks(world_size, function, folder):
    """What each rank makes of a function of its Fabric."""

    def rank():
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp")
        fabric.launch()
        torch.save(function(fabric), folder / f"{fabric.global_rank}.pt")
        torch.distributed.destroy_process_group()

    ranks = ForkedRanks(rank, world_size, folder)
    assert ranks.wait() == [0] * world_size, ranks.output(0)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world_size)]


# All lanes reduced at once; or apart, in pieces that do not fit the vectors, nor the ranks.
@pytest.mark.parametrize(("at_once", "piece"), [(1 << 19, 1 << 19), (0, 1 << 19), (0, 7)])
@pytest.mark.parametrize("world_size", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def test_any_split_over_ranks_gives_the_same_bits(tmp_path, monkeypatch, world_size, at_once, piece):
    monkeypatch.setattr(lane_sums, "_AT_ONCE", at_once)
    monkeypatch.setattr(lane_sums, "_PIECE", piece)
    alone = of_all_cases(Fabric(accelerator="cpu", devices=1))
    for found in in_ranks(world_size, of_all_cases, tmp_path):
        for case, (of_ranks, of_one) in enumerate(zip(found, alone, strict=True)):
            assert all(map(torch.equal, of_ranks, of_one)), case


def test_they_are_the_sums():
    for seed, totals in enumerate(of_all_cases(Fabric(accelerator="cpu", devices=1))):
        for total, (vectors, _) in zip(totals, cohorts(seed), strict=True):
            scale = vectors.double().abs().sum(dim=0).numpy()
            difference = np.abs(total.double().numpy() - vectors.double().sum(dim=0).numpy())
            # Thirty additions, each within half a unit in the last place.
            assert (difference <= 30 * 2.0**-24 * scale).all()


def test_memory_for_many_lanes_is_not_kept_for_few(monkeypatch):
    monkeypatch.setattr(lane_sums, "_AT_ONCE", 0)
    sums = LaneSums(SimpleNamespace(world_size=3, global_rank=0, device=torch.device("cpu")), torch.float32, 8)
    sums.start([9], 0, LaneDeal([[(i, i) for i in range(6)], [], []], first_half=4))
    vectors = [weakref.ref(sums.lane(lane)[0]) for lane in range(6)]
    sums.start([9], 0, LaneDeal([[(i, i) for i in range(3)], [], []], first_half=2))
    assert [vector() is not None for vector in vectors[2:]] == [True, False, False, False]


def test_without_lanes_the_split_shows(tmp_path):
    def in_any_order(fabric):
        return [summed(fabric, seed, None) for seed in range(CASES)]

    alone = in_any_order(Fabric(accelerator="cpu", devices=1))
    found = in_ranks(2, in_any_order, tmp_path)[0]
    assert not all(
        torch.equal(a, b) for one, two in zip(alone, found, strict=True) for a, b in zip(one, two, strict=True)
    )
