import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_feddua import ConfigurationError, FederatedDataModule
from lightning_feddua.data.partition import Partition


def test_partition_of_named_clients():
    dataset = TensorDataset(torch.arange(6))
    partition = Partition.from_values(dataset, np.array(["b", "a", "b", "c", "b", "a"]))
    assert list(partition) == ["b", "a", "c"]
    assert partition.sizes.tolist() == [3, 2, 1]
    assert [x.item() for (x,) in partition["a"]] == [1, 5]
    assert "d" not in partition
    assert list(Partition.from_values(dataset, pa.array(list("baabcb")), min_samples=2)) == ["b", "a"]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([[0, 1], []], r"leaves client `1` empty\. Use"),
        ({"eve": [0, 9]}, r"has the index 9, and the dataset has 6 rows\. Give"),
        ([[-1]], r"has the index -1"),
        (12, r"The partition is `12`\. Give index arrays"),
        ("iid", r"The partition is `'iid'`\. Give index arrays"),
        (np.arange(3), r"not a list of index arrays"),
        ([0, 1], r"not a list of index arrays, one for each client\. Give"),
        ([[0, 1], [1, 2]], r"gives row 1 2 times: to `0`, `1`\. Give each row"),
        ({"eve": [3, 3]}, r"gives row 3 2 times: to `eve`\. Give each row"),
        ({"eve": [0.5, 1.5]}, r"indices of client `eve` are `float64`\. Give whole numbers"),
        ([np.arange(6) < 2], r"indices of client `0` are `bool`\. .* `np.flatnonzero\(mask\)`"),
    ],
)
def test_bad_partitions(indices, message):
    with pytest.raises(ConfigurationError, match=message):
        FederatedDataModule.from_dataset(TensorDataset(torch.arange(6)), indices)


def test_the_order_of_clients_is_never_another(monkeypatch):
    """Grouping needs Arrow, which ``datasets`` installs; a substitute would sort the clients."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError):
        Partition.from_values(TensorDataset(torch.arange(3)), np.array(["b", "a", "b"]))


def test_clients_that_follow_one_another():
    partition = Partition.from_sizes(TensorDataset(torch.arange(5)), ["b", "a"], [2, 3])
    assert {name: rows.tolist() for name, rows in partition.items_by_rows()} == {"b": [0, 1], "a": [2, 3, 4]}
