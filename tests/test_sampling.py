import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_feddua import ConfigurationError, FedAvg, FederatedCallback, Scaffnew
from lightning_feddua.aggregation.dealing import deal, deal_lanes, deal_stacks
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.models import LinearRegression
from lightning_feddua.randomness import Purpose, generator, preserved_random_state, seed_generators
from lightning_feddua.sampling import ClientSampler, UniformSampler, sample_cohort


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(1, 300), st.data())
def test_cohort_is_a_sorted_set_of_clients(seed, round, population, data):
    size = data.draw(st.integers(1, population))
    cohort = sample_cohort(seed, round, population, size)
    assert len(set(cohort)) == size
    assert cohort == sorted(cohort)
    assert cohort[0] >= 0
    assert cohort[-1] < population
    assert cohort == sample_cohort(seed, round, population, size)


def test_every_client_is_drawn_equally_often():
    counts = np.bincount(np.concatenate([sample_cohort(0, t, 20, 5) for t in range(4000)]), minlength=20)
    # 1000 each, with standard deviation √(4000 · ¼ · ¾) ≈ 27.
    assert np.abs(counts - 1000).max() < 5 * 27


def test_seed_round_client_and_purpose_all_matter():
    draws = {
        generator(*key).random()
        for key in [
            (0, 0, 0, Purpose.COHORT),
            (1, 0, 0, Purpose.COHORT),
            (0, 1, 0, Purpose.COHORT),
            (0, 0, 1, Purpose.COHORT),
            (0, 0, 0, Purpose.MINIBATCHES),
        ]
    }
    assert len(draws) == 5


@given(st.lists(st.floats(0.1, 100), max_size=40), st.integers(1, 9))
def test_dealing_covers_the_cohort_and_balances(costs, world_size):
    hands = deal(costs, world_size)
    assert len(hands) == world_size
    assert sorted(position for hand in hands for position in hand) == list(range(len(costs)))
    loads = [sum(costs[i] for i in hand) for hand in hands]
    # Longest first: nobody has more than the mean and one client on top.
    assert max(loads) <= sum(costs) / world_size + max(costs, default=0) + 1e-9


@given(st.lists(st.floats(0.1, 100), max_size=40), st.integers(1, 9), st.integers(1, 9))
def test_lanes_depend_on_the_cohort_alone_and_stay_whole(costs, lanes, world_size):
    hands, first_half = deal_lanes(costs, lanes, world_size)
    lane_of = {position: lane for hand in hands for position, lane in hand}
    assert sorted(position for hand in hands for position, _ in hand) == list(range(len(costs)))
    alone = deal_lanes(costs, lanes, 1)
    assert (lane_of, first_half) == (dict(alone.hands[0]), alone.first_half)
    ranks_of_lanes = {(lane, rank) for rank, hand in enumerate(hands) for _, lane in hand}
    assert len(ranks_of_lanes) == len({lane for lane, _ in ranks_of_lanes})
    if world_size == 2:
        assert all(int(lane >= first_half) == rank for lane, rank in ranks_of_lanes)
    for hand in hands:
        for half in (True, False):
            of_half = [lane for _, lane in hand if (lane < first_half) == half]
            assert of_half == sorted(of_half)
        for lane in {lane for _, lane in hand}:
            positions = [position for position, other in hand if other == lane]
            assert positions == sorted(positions)


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(Purpose))
def test_a_generator_is_a_function_of_its_arguments(seed, round, client, purpose):
    first, second = (generator(seed, round, client, purpose).random(3) for _ in range(2))
    assert (first == second).all()
    assert (generator(seed, round, client + 1, purpose).random(3) != first).any()


@pytest.mark.parametrize("others", [10, 19, 30, 99])
@pytest.mark.parametrize("lanes", [None, 8])
def test_skewed_sizes_are_split_evenly(others, lanes):
    costs = [10] + [1] * others
    loads = [sum(costs[position] for position, _ in hand) for hand in deal_lanes(costs, lanes, 2).hands]
    assert max(loads) <= 1.1 * sum(costs) / 2


def test_local_steps_seed_all_generators():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    seed_generators(0, 1, 2, Purpose.LOCAL_STEPS, torch.device("cpu"))
    first = draw()
    seed_generators(0, 1, 3, Purpose.LOCAL_STEPS, torch.device("cpu"))
    other = draw()
    seed_generators(0, 1, 2, Purpose.LOCAL_STEPS, torch.device("cpu"))
    assert draw() == first
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_random_state_of_the_caller_is_preserved():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    with preserved_random_state(torch.device("cpu")):
        seed_generators(0, 0, 0, Purpose.LOCAL_STEPS, torch.device("cpu"))
    assert (torch.rand(1), random.random(), np.random.rand()) == expected


class Shifts(ClientSampler):
    """A third of the clients at a time; nobody in every fourth round."""

    def __init__(self, shifts=3):
        self.shifts = shifts

    def sample(self, seed, round, population):
        return [] if round == 3 else range(round % self.shifts, population, self.shifts)


def _fit(make_loop, ckpt_path=None, **arguments):
    loop = make_loop(precision="64-true", **{"max_rounds": 5, **arguments})
    loop.fit(LinearRegression(dim=6), SyntheticRegression(num_clients=7, samples_per_client=5, dim=6), ckpt_path)
    return loop


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sampler_of_ones_own(make_loop, ranks):
    """Cohorts may differ in size and may be empty: then nothing moves."""
    cohorts, weights = [], []

    class Note(FederatedCallback):
        def on_round_start(self, loop, cohort):
            cohorts.append(cohort)

        def on_round_end(self, loop):
            weights.append(loop.weights.clone())
            expected = [[0, 3, 6], [1, 4], [2, 5], [], [1, 4]][: len(cohorts)]
            assert cohorts == expected
            assert len(cohorts) != 4 or torch.equal(weights[-1], weights[-2])

    arguments = {"devices": 2, "strategy": "ddp_fork"} if ranks == 2 else {}
    loop = _fit(make_loop, sampler=Shifts(), callbacks=Note(), **arguments)
    assert [row["clients"] for row in loop.history] == [3, 2, 2, 0, 2]
    assert loop.history[3]["eta_g"] == 0


def test_the_default_sampler_is_what_clients_per_round_says(make_loop):
    first = _fit(make_loop, clients_per_round=3, engine="sequential")
    second = _fit(make_loop, sampler=UniformSampler(3), engine="sequential")
    assert torch.equal(first.weights, second.weights)


def test_a_sampler_decides_the_result(make_loop):
    first = _fit(make_loop, sampler=Shifts(2), max_rounds=1, checkpoint_every=1)
    path = first.run_dir / "last.ckpt"
    with pytest.raises(ConfigurationError, match=r"`sampler.shifts` was `2` and is `3`"):
        _fit(make_loop, path, sampler=Shifts(3))
    with pytest.raises(ConfigurationError, match=r"`clients_per_round` was `None` and is `7`"):
        _fit(make_loop, path)


@pytest.mark.parametrize(
    ("cohort", "message"),
    [
        ([0, 7], r"`Wrong.sample` returned client 7, and there are 7 clients\. Return"),
        ([-1], r"returned client -1"),
        ([1, 1], r"returned a client twice\. Return each"),
        ([0.5], r"is not a list of whole numbers\. Return"),
        ("01", r"a `str` that is not a list"),
    ],
)
def test_what_cannot_be_a_cohort(make_loop, cohort, message):
    class Wrong(ClientSampler):
        def sample(self, seed, round, population):
            return cohort

    with pytest.raises(ConfigurationError, match=message):
        _fit(make_loop, sampler=Wrong())


def test_algorithms_that_need_everybody(make_loop):
    with pytest.raises(ConfigurationError, match="`Scaffnew` needs all 7 clients in each round"):
        _fit(make_loop, sampler=Shifts(), client=Scaffnew(), server=FedAvg())


def test_two_ways_to_choose_are_one_too_many(make_loop):
    with pytest.raises(ConfigurationError, match="Both `sampler` and `clients_per_round=3` choose who takes part"):
        make_loop(sampler=Shifts(), clients_per_round=3)


def stack_cost(steps):
    """What a stack costs: its start in each step, and each client's steps."""
    return 4 * max(steps, default=0) + sum(steps)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_stacks_are_dealt_by_the_longest_client(world_size):
    rng = np.random.default_rng(world_size)
    ratios = []
    for _ in range(30):
        steps = rng.integers(1, 40, rng.integers(0, 25)).tolist()
        hands = deal_stacks(steps, world_size)
        assert sorted(position for hand in hands for position in hand) == list(range(len(steps)))
        assert len(hands) == world_size
        slowest = max(stack_cost([steps[i] for i in hand]) for hand in hands)
        balanced = max(stack_cost([steps[i] for i in hand]) for hand in deal(steps, world_size))
        ratios.append(slowest / max(balanced, 1))
    assert max(ratios) <= 1
    assert np.mean(ratios) < 0.98 or world_size == 1


def test_long_clients_make_one_stack_and_short_ones_another():
    assert deal_stacks([10, 40, 10, 30, 10, 30, 10, 10, 10], 2) == [[1, 3], [0, 2, 4, 5, 6, 7, 8]]
    # Of equal clients each rank has as many as the others.
    assert deal_stacks([5] * 6, 3) == deal([5] * 6, 3)
