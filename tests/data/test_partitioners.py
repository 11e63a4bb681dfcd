import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from lightning_feddua import ConfigurationError, FederatedDataModule
from lightning_feddua.data import (
    DirichletPartitioner,
    EqualDirichletPartitioner,
    IIDPartitioner,
    NaturalPartitioner,
    Partitioner,
    PathologicalPartitioner,
    QuantitySkewPartitioner,
    ShardPartitioner,
)
from tests.modules import classification

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


def test_natural_clients_are_those_of_the_values_in_order_of_appearance():
    values = np.array(["b", "a", "b"])
    partition = NaturalPartitioner().partition(values)
    assert [(name, rows.tolist()) for name, rows in partition.items()] == [("b", [0, 2]), ("a", [1])]
    data = FederatedDataModule.from_dataset(classification(3), NaturalPartitioner(), labels=values)
    assert list(data.client_ids) == list(partition)


class Returns(Partitioner):
    """A partitioner that returns what it was given."""

    def __init__(self, parts):
        super().__init__(num_clients=1)
        self.parts = parts

    def split(self, labels, rng):
        return self.parts


def test_a_partitioner_is_one_method():
    class Halves(Partitioner):
        def split(self, labels, rng):
            return np.array_split(rng.permutation(len(labels)), self.num_clients)

    parts = Halves(2, seed=3).partition(np.zeros(6))
    assert [p.tolist() for p in parts] == np.random.default_rng(3).permutation(6).reshape(2, 3).tolist()
    with pytest.raises(TypeError, match="abstract"):
        Partitioner(2)


def test_a_partitioner_may_name_its_clients():
    named = Returns({"zoe": np.array([4, 0]), "al": np.array([2])})
    assert {name: rows.tolist() for name, rows in named.partition(np.zeros(6)).items()} == {"zoe": [4, 0], "al": [2]}
    data = FederatedDataModule.from_dataset(TensorDataset(torch.arange(6)), named, labels=np.zeros(6))
    assert data.client_ids == ["zoe", "al"]
    assert data.client_data("zoe").batch(np.arange(2))[0].tolist() == [4, 0]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (None, r"`Returns.split` returned a `NoneType`\. Return a list of index arrays"),
        ("ab", r"`Returns.split` returned a `str`\. Return"),
        (iter([np.arange(2)]), r"`Returns.split` returned a `\w+`\. Return"),
        ([0, 1], r"`Returns.split` returned a `int` for client `0`\. Return a one-dimensional NumPy array"),
        (np.arange(3), r"returned a `int64` for client `0`"),
        ({"al": [0, 1]}, r"returned a `list` for client `al`\. Return"),
        ({"al": np.zeros((2, 2), int)}, r"returned a `ndarray` of shape \(2, 2\) for client `al`\. Return"),
        ({"al": np.array([0.5])}, r"The indices of client `al` are `float64`\. Give whole numbers"),
        ([np.arange(6) < 2], r"The indices of client `0` are `bool`\. .* `np.flatnonzero\(mask\)`"),
    ],
)
def test_what_split_may_not_return(parts, message):
    with pytest.raises(ConfigurationError, match=message):
        Returns(parts).partition(np.zeros(6))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"al": np.array([0, 1]), "zoe": np.array([1])}, r"gives row 1 2 times: to `al`, `zoe`\. Give each row"),
        ({"al": np.array([9])}, r"has the index 9, and the dataset has 6 rows\. Give"),
        ({"al": np.array([], int)}, r"leaves client `al` empty\. Use"),
        ({1: np.array([0]), "1": np.array([1])}, r"2 clients have the name `1`\. Give each client its own name"),
    ],
)
def test_what_clients_may_not_share(parts, message):
    with pytest.raises(ConfigurationError, match=message):
        FederatedDataModule.from_dataset(TensorDataset(torch.arange(6)), Returns(parts), labels=np.zeros(6))


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
        (lambda: DirichletPartitioner(3, alpha=float("inf")), r"`alpha=inf` is not finite\. Give"),
        (lambda: QuantitySkewPartitioner(3, alpha=float("nan")), r"`alpha=nan` is not a number\. Give"),
        (lambda: IIDPartitioner(2.5), r"`num_clients=2.5` is not a whole number\. Give"),
        (lambda: ShardPartitioner(2, 0), r"`shards_per_client=0` is less than 1\. Give"),
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
