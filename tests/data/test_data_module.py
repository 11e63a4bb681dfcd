import tracemalloc
from collections.abc import Mapping

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from lightning import LightningDataModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_feddua import ConfigurationError, FederatedDataModule, FederatedLoop
from lightning_feddua.data import HuggingFaceDataModule, IIDPartitioner, NaturalPartitioner, PathologicalPartitioner
from lightning_feddua.data.module import labels_of
from lightning_feddua.data.partition import Partition
from lightning_feddua.sampling import sample_cohort
from tests.modules import Classifier, classification


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


def test_partitioner_finds_the_labels():
    dataset = classification(90)
    data = FederatedDataModule.from_dataset(dataset, PathologicalPartitioner(6, 1))
    assert {len(dataset.tensors[1][data.clients.rows(i)].unique()) for i in range(6)} == {1}

    class Hidden(Dataset):
        def __len__(self):
            return 10

    with pytest.raises(ConfigurationError, match=r"A `Hidden` shows no labels"):
        FederatedDataModule.from_dataset(Hidden(), IIDPartitioner(2))
    assert FederatedDataModule.from_dataset(Hidden(), IIDPartitioner(2), labels=np.zeros(10)).client_sizes().sum() == 10
    with pytest.raises(ConfigurationError, match=r"labels have the shape \(9,\), and the dataset has 10 rows\. Give"):
        FederatedDataModule.from_dataset(Hidden(), IIDPartitioner(2), labels=np.zeros(9))
    assert labels_of(torch.utils.data.Subset(dataset, [3, 4])).tolist() == dataset.tensors[1][[3, 4]].tolist()


def test_a_list_of_clients_is_refused():
    with pytest.raises(ConfigurationError, match=r"The clients are a `list`\. Give a mapping"):
        FederatedDataModule([classification(3)])


def test_unknown_client_is_named():
    with pytest.raises(ConfigurationError, match=r"There is no client `zoe`\. Choose one of `alice`"):
        FederatedDataModule({"alice": classification(3)}).client_data("zoe")
    with pytest.raises(ConfigurationError, match=r"Choose one of `0`, .*, `9` and so on\.$"):
        FederatedDataModule({str(i): classification(3) for i in range(12)}).client_data("zoe")


def test_lightning_datamodule_is_federated(tmp_path):
    data = FederatedDataModule.from_datamodule(BoringDataModule(), IIDPartitioner(4), labels=np.zeros(64))
    loop = FederatedLoop(max_rounds=2, local_steps=2, out_dir=tmp_path, accelerator="cpu", enable_progress_bar=False)
    loop.fit(BoringModel(), data)
    assert len(loop.history) == 2
    assert loop.history[0]["clients"] == 4


class WithHooks(LightningDataModule):
    """Own batch size, collation and transfer hook, data made in `setup`."""

    def setup(self, stage):
        self.dataset = classification(48)

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=6, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self):
        return DataLoader(self.dataset, batch_size=10, collate_fn=self.collate)

    @staticmethod
    def collate(samples):
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        assert self.trainer is not None
        return batch["x"], batch["y"]


def test_wrapped_hooks_and_collation_count(tmp_path):
    data = FederatedDataModule.from_datamodule(WithHooks(), [np.arange(24), np.arange(24, 48)])
    loop = FederatedLoop(max_rounds=1, local_steps=2, out_dir=tmp_path, accelerator="cpu", enable_progress_bar=False)
    loop.fit(Classifier(), data)
    assert data.batch_size == 6
    assert data.evaluation_data("validation")[1] == 10
    assert "val_acc" in loop.history[0]
    assert data.hook_owner.trainer is None


def test_module_finds_its_own_data_module(tmp_path):
    class Asks(Classifier):
        def setup(self, stage):
            assert isinstance(self.trainer.datamodule, WithHooks)

    data = FederatedDataModule.from_datamodule(WithHooks(), IIDPartitioner(2))
    FederatedLoop(local_steps=1, out_dir=tmp_path, accelerator="cpu").validate(Asks(), data)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(classification(6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampler": torch.utils.data.SubsetRandomSampler([0, 1])}, r"with a `SubsetRandomSampler`, .* a `Subset`"),
        ({"sampler": torch.utils.data.WeightedRandomSampler(torch.ones(6), 6)}, r"with a `WeightedRandomSampler`"),
        ({"sampler": torch.utils.data.RandomSampler(classification(6), num_samples=3)}, r"with a `RandomSampler`"),
        ({"dataset": Stream()}, r"returned a `DataLoader` that cannot be indexed\. Return"),
    ],
)
def test_loaders_that_cannot_be_federated(arguments, message):
    loader = DataLoader(**{"dataset": classification(6), "batch_size": 2, **arguments})
    with pytest.raises(ConfigurationError, match=message):
        FederatedDataModule.from_datamodule(Loaders(loader), [[0, 1], [2, 3]]).setup("fit")


class Loaders(LightningDataModule):
    def __init__(self, train=None, val=None):
        super().__init__()
        self.train, self.val = train, val

    def train_dataloader(self):
        return self.train

    def val_dataloader(self):
        return self.val


def test_loaders_that_are_not_there(tmp_path):
    train, val = DataLoader(classification(6), batch_size=2), DataLoader(classification(4))
    loop = FederatedLoop(max_rounds=1, local_steps=1, out_dir=tmp_path, accelerator="cpu", enable_progress_bar=False)
    for none in (None, []):
        loop.fit(Classifier(), FederatedDataModule.from_datamodule(Loaders(train, none), np.arange(6).reshape(2, 3)))
        assert "val_acc" not in loop.history[0]
    # Before the first round, of which the history would tell.
    with pytest.raises(ConfigurationError, match=r"`Loaders.val_dataloader` returned a `list` that cannot be indexed"):
        loop.fit(Classifier(), FederatedDataModule.from_datamodule(Loaders(train, [val, val]), [[0], [1]]))
    assert loop.history == []
    with pytest.raises(ConfigurationError, match=r"`LightningDataModule.train_dataloader` returned a `NoneType`"):
        FederatedDataModule.from_datamodule(LightningDataModule(), [[0]]).setup("fit")


def test_natural_clients_keep_their_names():
    data = FederatedDataModule.from_dataset(classification(4), NaturalPartitioner(), labels=np.array(list("yxyz")))
    assert {name: len(rows) for name, rows in data.clients.items()} == {"y": 2, "x": 1, "z": 1}


class Stages(LightningDataModule):
    """Sets up its test data in its own stage, with another collation than training."""

    def setup(self, stage):
        if stage == "fit":
            self.train = classification(30)
        if stage == "test":
            self.test = classification(12, seed=5)

    def train_dataloader(self):
        sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(self.train), 5, drop_last=False)
        return DataLoader(self.train, batch_sampler=sampler, collate_fn=lambda samples: self.collate(samples, 100.0))

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=7, collate_fn=lambda samples: self.collate(samples, 1.0))

    def collate(self, samples, scale):
        return torch.stack([x for x, _ in samples]) * scale, torch.stack([y for _, y in samples])


def test_stages_and_collations_of_a_wrapped_module(tmp_path):
    class Tested(Classifier):
        test_step = Classifier.validation_step

    model = Tested()
    data = FederatedDataModule.from_datamodule(Stages(), IIDPartitioner(2))
    expected = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path).test(
        model, Stages(), verbose=False
    )
    loop = FederatedLoop(local_steps=1, out_dir=tmp_path, accelerator="cpu")
    assert loop.test(model, data) == expected[0]
    assert data.batch_size == 5
    assert data.label_counts().sum() == 30


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"client_column": "writer"}, r"no column `writer`\. Choose one of its columns: `features`, `label`, `user`"),
        ({"client_column": "user", "columns": {"x": "image"}}, r"no column `image`"),
        ({"client_column": "user", "val_split": "dev"}, r"has no split `dev`"),
        ({"client_column": "user", "min_samples": 9}, r"No client has 9 samples: the largest has 8\. Choose"),
        ({"partitioner": IIDPartitioner(2), "label_column": "user"}, r"column `user` holds .*, not labels"),
        ({"partitioner": IIDPartitioner(2)}, r"partitioner has no labels\. Name"),
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
        (__file__, r"test_data_module.py` is a file\. Give the folder"),
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


class LazyClients(Mapping):
    """A million clients, made when they are asked for; one of them has no samples."""

    empty = None

    def __init__(self):
        self.made = []

    def __getitem__(self, name):
        self.made.append(name)
        return classification(0 if int(name) == self.empty else 5 + int(name) % 3)

    def __iter__(self):
        return map(str, range(10**6))

    def __len__(self):
        return 10**6


class LazyClientsWithSizes(LazyClients):
    ids = range(10**6)
    sizes = np.tile([5, 6, 7], 10**6 // 3 + 1)[: 10**6]


def lazy_loop(tmp_path, **arguments):
    return FederatedLoop(
        max_rounds=2,
        clients_per_round=3,
        out_dir=tmp_path,
        accelerator="cpu",
        enable_progress_bar=False,
        engine="sequential",
        **arguments,
    )


@pytest.mark.parametrize(
    ("clients", "work"),
    [
        (LazyClients, {"local_steps": 2}),
        (LazyClients, {"local_steps": 2, "client_weights": "samples"}),
        (LazyClientsWithSizes, {"local_steps": 2}),
        (LazyClientsWithSizes, {"local_epochs": 1}),
    ],
)
def test_only_cohorts_are_made_of_a_lazy_population(tmp_path, clients, work):
    population = clients()
    lazy_loop(tmp_path, **work).fit(Classifier(), population)
    cohorts = {str(i) for round in range(2) for i in sample_cohort(0, round, 10**6, 3)}
    assert {str(name) for name in population.made} == cohorts
    assert len(population.made) == 2 * 3


def test_names_of_a_million_clients_take_no_memory():
    tracemalloc.start()
    data = FederatedDataModule(LazyClientsWithSizes())
    assert len(data.client_ids) == len(data.client_sizes()) == 10**6
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**5


def test_an_empty_client_of_a_lazy_population_is_named_when_it_is_met(tmp_path):
    population = LazyClients()
    population.empty = sample_cohort(0, 0, 10**6, 3)[0]
    with pytest.raises(ConfigurationError, match=rf"dataset of client `{population.empty}` is empty\. Leave"):
        lazy_loop(tmp_path, local_steps=1).fit(Classifier(), population)


def test_a_schedule_over_a_lazy_population_gets_the_largest_client(tmp_path):
    class Scheduled(Classifier):
        def configure_optimizers(self):
            self.asked = self.trainer.num_training_batches
            return super().configure_optimizers()

    module = Scheduled()
    lazy_loop(tmp_path, local_steps=1).fit(module, FederatedDataModule(LazyClientsWithSizes(), batch_size=2))
    assert module.asked == 4
