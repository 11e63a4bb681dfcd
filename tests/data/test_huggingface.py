import tracemalloc

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

from lightning_feddua import ConfigurationError, FederatedDataModule, FederatedLoop
from lightning_feddua.data import (
    DirichletPartitioner,
    HuggingFaceDataModule,
    IIDPartitioner,
    Partitioner,
    PathologicalPartitioner,
)
from tests.modules import Classifier


@pytest.fixture
def folder(tmp_path):
    """A small dataset in the hub's layout: parquet files named after their split."""
    for split, rows in (("train", 30), ("test", 8)):
        table = {
            "user": [f"user {i % 4}" for i in range(rows)],
            "features": [[float(i), 1.0, 2.0, 3.0] for i in range(rows)],
            "label": [i % 3 for i in range(rows)],
        }
        datasets.Dataset.from_dict(table).to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    return str(tmp_path / "data")


def to_tensors(sample):
    return torch.tensor(sample["x"]), sample["y"]


def test_huggingface_client_column(folder, tmp_path):
    data = FederatedDataModule.from_huggingface(
        folder, client_column="user", columns={"x": "features", "y": "label"}, transform=to_tensors, val_split="test"
    )
    loop = FederatedLoop(max_rounds=1, local_steps=2, out_dir=tmp_path, accelerator="cpu", enable_progress_bar=False)
    loop.fit(Classifier(), data)
    assert list(data.client_ids) == [f"user {i}" for i in range(4)]
    x, y = data.client_data("user 1").batch(np.array([0, 2]))
    assert x[:, 0].tolist() == [1.0, 9.0]
    assert y.tolist() == [1, 0]
    assert "val_acc" in loop.history[0]


def test_huggingface_folder_of_save_to_disk(tmp_path):
    dataset = datasets.Dataset.from_dict({"user": ["a", "b", "a"], "x": [1.0, 2.0, 3.0]})
    dataset.save_to_disk(tmp_path / "saved")
    data = HuggingFaceDataModule(str(tmp_path / "saved"), client_column="user")
    data.setup("fit")
    assert data.client_sizes().tolist() == [2, 1]
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        HuggingFaceDataModule(str(tmp_path / "saved"), client_column="user", val_split="test").setup("fit")


def test_huggingface_partitioner(folder):
    data = HuggingFaceDataModule(folder, partitioner=PathologicalPartitioner(3, 1), label_column="label")
    data.setup("fit")
    for i in range(3):
        assert len(set(data.client_data(str(i)).batch(np.arange(10))["label"].tolist())) == 1
    assert data.num_classes == 3


class ByLabel(Partitioner):
    def split(self, labels, rng):
        return {f"label {label}": np.flatnonzero(labels == label) for label in (2, 0, 1)}


def test_huggingface_partitioner_names_its_clients(folder):
    data = HuggingFaceDataModule(folder, partitioner=ByLabel(3), label_column="label")
    data.setup("fit")
    assert data.client_ids == ["label 2", "label 0", "label 1"]
    assert set(data.client_data("label 2").batch(np.arange(10))["label"].tolist()) == {2}
    assert data.label_counts().tolist() == [[0, 0, 10], [10, 0, 0], [0, 10, 0]]


def test_labels_of_a_client_column_are_counted(folder):
    data = HuggingFaceDataModule(folder, client_column="user", label_column="label")
    data.setup("fit")
    expected = [np.bincount(np.arange(user, 30, 4) % 3).tolist() for user in range(4)]
    assert data.label_counts().tolist() == expected
    data = HuggingFaceDataModule(folder, client_column="user")
    data.setup("fit")
    with pytest.raises(ConfigurationError, match=r"No labels can be found in .* `HubRows`: .*\. Use .* `label_column`"):
        data.label_counts()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"client_column": "writer"}, r"no column `writer`\. Choose one of its columns: `features`, `label`, `user`"),
        ({"client_column": "user", "columns": {"x": "image"}}, r"no column `image`"),
        ({"client_column": "user", "val_split": "dev"}, r"has no split `dev`"),
        ({"client_column": "user", "min_samples": 9}, r"No client has 9 samples: the largest has 8\. Choose"),
        ({"partitioner": IIDPartitioner(2), "label_column": "user"}, r"column `user` holds .*, not labels"),
        ({"partitioner": DirichletPartitioner(2)}, r"partitioner has no labels\. Name"),
        ({}, r"unclear who the clients are: neither"),
    ],
)
def test_bad_huggingface_arguments(folder, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        HuggingFaceDataModule(folder, **arguments).setup("fit")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./no/such/folder", r"The folder `./no/such/folder` does not exist\. Give"),
        (__file__, r"test_huggingface.py` is a file\. Give the folder"),
        ("nobody/nothing", r"dataset `nobody/nothing` cannot be loaded: .*\. Check the name and the connection"),
    ],
)
def test_data_that_cannot_be_reached(path, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match=message):
        HuggingFaceDataModule(path, client_column="user").setup("fit")


def test_a_hundred_thousand_clients_cost_nothing_until_sampled(tmp_path):
    """Memory goes with the rows: as many rows for a thousand times the clients take about the same."""
    rows = 200_000
    peaks = {}
    for clients in (100, 100_000):
        path = tmp_path / f"{clients}"
        users = pa.array(np.arange(rows) % clients).cast(pa.string())
        table = pa.table({"user": users, "x": pa.array(np.arange(rows, dtype=np.float32))})
        datasets.Dataset(table).to_parquet(path / "train-00000-of-00001.parquet")
        data = HuggingFaceDataModule(str(path), client_column="user", columns={"x": "x"})
        tracemalloc.start()
        data.setup("fit")
        peaks[clients] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(data.client_ids) == clients
        assert data.client_sizes().sum() == rows
        batch = data.client_data(str(clients - 1)).batch(np.arange(2))
        assert batch["x"].tolist() == [clients - 1, 2 * clients - 1]
    assert peaks[100_000] < peaks[100] + 20e6
