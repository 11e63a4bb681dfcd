import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lightning_feddua import ConfigurationError, FederatedDataModule
from lightning_feddua.data import (
    IIDPartitioner,
    NaturalPartitioner,
    PathologicalPartitioner,
    QuantitySkewPartitioner,
)
from lightning_feddua.data.splits import labels_of
from tests.modules import classification


def test_partitioner_finds_the_labels():
    dataset = classification(90)
    data = FederatedDataModule.from_dataset(dataset, PathologicalPartitioner(6, 1))
    assert {len(dataset.tensors[1][data.clients.rows(i)].unique()) for i in range(6)} == {1}

    class Hidden(Dataset):
        def __len__(self):
            return 10

    with pytest.raises(ConfigurationError, match=r"No labels can be found in a dataset of type `Hidden`"):
        FederatedDataModule.from_dataset(Hidden(), PathologicalPartitioner(2, 1))
    assert FederatedDataModule.from_dataset(Hidden(), IIDPartitioner(2), labels=np.zeros(10)).client_sizes().sum() == 10
    with pytest.raises(ConfigurationError, match=r"labels have the shape \(9,\), and the dataset has 10 rows\. Give"):
        FederatedDataModule.from_dataset(Hidden(), IIDPartitioner(2), labels=np.zeros(9))
    assert labels_of(torch.utils.data.Subset(dataset, [3, 4])).tolist() == dataset.tensors[1][[3, 4]].tolist()


def test_natural_clients_keep_their_names():
    data = FederatedDataModule.from_dataset(classification(4), NaturalPartitioner(), labels=np.array(list("yxyz")))
    assert {name: len(rows) for name, rows in data.clients.items()} == {"y": 2, "x": 1, "z": 1}


def test_given_labels_are_counted_though_the_dataset_hides_them():
    dataset = TensorDataset(torch.zeros(6))
    for partition in (IIDPartitioner(2), [[0, 1, 2], [3, 4, 5]]):
        data = FederatedDataModule.from_dataset(dataset, partition, labels=np.array([0, 1, 2, 0, 1, 2]))
        assert data.label_counts().sum(axis=0).tolist() == [2, 2, 2]


class Bare(Dataset):
    """No labels; or targets that are no labels, as in regression or detection."""

    def __init__(self, targets=None):
        if targets is not None:
            self.targets = targets

    def __len__(self):
        return 11

    def __getitem__(self, row):
        return torch.full((2,), float(row))


@pytest.mark.parametrize("targets", [None, torch.zeros(11, 3), [[1], [2, 3]], {"a": 1}])
@pytest.mark.parametrize("partitioner", [IIDPartitioner(3), QuantitySkewPartitioner(3)])
def test_random_rows_need_no_labels(targets, partitioner):
    bare = FederatedDataModule.from_dataset(Bare(targets), partitioner)
    labelled = FederatedDataModule.from_dataset(Bare(), partitioner, labels=np.arange(11))
    assert bare.client_sizes().sum() == 11
    for i in range(3):
        assert np.array_equal(bare.clients.rows(i), labelled.clients.rows(i))
