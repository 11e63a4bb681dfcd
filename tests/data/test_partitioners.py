import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_feddua import ConfigurationError
from lightning_feddua.data import (
    DirichletPartitioner,
    EqualDirichletPartitioner,
    IIDPartitioner,
    NaturalPartitioner,
    PathologicalPartitioner,
    QuantitySkewPartitioner,
    ShardPartitioner,
)

PARTITIONERS = {
    "iid": lambda n, seed: IIDPartitioner(n, seed=seed),
    "dirichlet": lambda n, seed: DirichletPartitioner(n, alpha=1.0, seed=seed),
    "equal dirichlet": lambda n, seed: EqualDirichletPartitioner(n, alpha=0.3, seed=seed),
    "shards": lambda n, seed: ShardPartitioner(n, seed=seed),
    "pathological": lambda n, seed: PathologicalPartitioner(n, 3, seed=seed),
    "quantity": lambda n, seed: QuantitySkewPartitioner(n, seed=seed),
}


def labels(rows, classes, seed=0):
    return np.random.default_rng(seed).integers(classes, size=rows)


@pytest.mark.parametrize("name", PARTITIONERS)
@given(st.integers(150, 600), st.integers(3, 10), st.integers(0, 5))
@settings(max_examples=25)
def test_every_row_is_dealt_exactly_once_and_seeded(name, rows, clients, seed):
    y = labels(rows, classes=5, seed=seed)
    partition = PARTITIONERS[name](clients, seed).partition(y)
    assert len(partition) == clients
    assert min(map(len, partition)) > 0
    assert np.array_equal(np.sort(np.concatenate(partition)), np.arange(rows))
    again = PARTITIONERS[name](clients, seed).partition(y)
    assert all(np.array_equal(a, b) for a, b in zip(partition, again, strict=True))
    other = PARTITIONERS[name](clients, seed + 1).partition(y)
    assert any(not np.array_equal(a, b) for a, b in zip(partition, other, strict=True))


@pytest.mark.parametrize("name", PARTITIONERS)
def test_fifty_thousand_rows_are_split_at_once(name):
    y = labels(50_000, classes=10)
    partitioner = PARTITIONERS[name](100, 0)
    best = min(_seconds(partitioner, y) for _ in range(5))
    assert best < 0.5, "this is no benchmark: it fails where a loop over rows has crept in"


def _seconds(partitioner, y):
    start = time.perf_counter()
    partitioner.partition(y)
    return time.perf_counter() - start


def test_natural_clients_are_those_of_the_values():
    assert [p.tolist() for p in NaturalPartitioner().partition(np.array(["b", "a", "b"]))] == [[1], [0, 2]]


@given(st.integers(100, 1000), st.integers(2, 20), st.floats(0.01, 10))
@settings(max_examples=25)
def test_equal_dirichlet_has_equal_sizes(rows, clients, alpha):
    sizes = [len(p) for p in EqualDirichletPartitioner(clients, alpha).partition(labels(rows, 7))]
    assert max(sizes) - min(sizes) <= 1


def _entropy(partition, y):
    shares = np.array([np.bincount(y[rows], minlength=10) / len(rows) for rows in partition])
    return -(shares * np.log(shares + 1e-12)).sum(1).mean()


@pytest.mark.parametrize("partitioner", [DirichletPartitioner, EqualDirichletPartitioner])
def test_small_alpha_means_skewed_clients(partitioner):
    y = labels(20_000, 10)
    entropies = [_entropy(partitioner(50, alpha).partition(y), y) for alpha in (0.05, 0.3, 100.0)]
    assert entropies[0] < entropies[1] < entropies[2]
    assert entropies[2] == pytest.approx(np.log(10), abs=0.05)


def test_dirichlet_shares_have_the_right_distribution():
    """The share of a class that a client gets is Beta(α, (N−1)α): mean 1/N, variance (N−1)/(N²(Nα+1))."""
    y = np.zeros(10_000, dtype=int)
    shares = np.array(
        [[len(p) / 10_000 for p in DirichletPartitioner(5, 0.5, seed=s).partition(y)] for s in range(400)]
    )
    assert shares.mean() == pytest.approx(0.2)
    assert shares.var() == pytest.approx(4 / (25 * 3.5), rel=0.15)


def test_shards_and_pathological_have_few_classes():
    y = np.repeat(np.arange(10), 100)
    assert max(len(set(y[p])) for p in ShardPartitioner(50, 2).partition(y)) <= 4
    assert {len(set(y[p])) for p in PathologicalPartitioner(20, 2).partition(y)} == {2}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IIDPartitioner(0), r"`num_clients=0` is less than 1\. Give"),
        (lambda: DirichletPartitioner(3, alpha=0), r"`alpha=0` is not positive\. Give"),
        (lambda: IIDPartitioner(11).partition(np.zeros(10)), r"11 clients cannot share 10 rows\. Use"),
        (lambda: DirichletPartitioner(5, min_samples=3).partition(np.zeros(10)), r"5 clients of at least 3 rows each"),
        (
            lambda: DirichletPartitioner(50, 0.001, min_samples=5).partition(np.zeros(1000, int)),
            r"No draw in 100 gave each of 50 clients 5 rows at alpha=0.001\. Use",
        ),
        (lambda: ShardPartitioner(6, 2).partition(np.zeros(10)), r"12 shards cannot share 10 rows\. Use"),
        (lambda: PathologicalPartitioner(2, 2).partition(labels(100, 10)), r"2 clients of 2 classes .* 10 classes"),
        (lambda: PathologicalPartitioner(5, 4).partition(labels(100, 2)), r"5 clients of 4 classes .* 2 classes"),
        (lambda: QuantitySkewPartitioner(5, min_samples=3).partition(np.zeros(10)), r"5 clients of at least 3 rows"),
    ],
)
def test_constraints_that_cannot_be_met(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
