import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch.utils.data import DataLoader

from lightning_feddua import ConfigurationError, FederatedDataModule, FederatedLoop
from lightning_feddua.data import IIDPartitioner
from tests.modules import Classifier, classification
from tests.trainers import quiet_trainer


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
    assert data.evaluation_data("validation")[0].batch_size == 10
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
        ({"sampler": torch.utils.data.RandomSampler(classification(6), num_samples=3)}, r"with a `RandomSampler`"),
        ({"dataset": Stream()}, r"returned a `DataLoader` whose rows cannot be dealt to clients\. Return"),
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
    with pytest.raises(ConfigurationError, match=r"`Classifier.validation_step` takes no `dataloader_idx`, and there"):
        loop.fit(Classifier(), FederatedDataModule.from_datamodule(Loaders(train, [val, val]), [[0], [1]]))
    assert loop.history == []
    with pytest.raises(ConfigurationError, match=r"train_dataloader` returned 0 loaders whose rows"):
        FederatedDataModule.from_datamodule(LightningDataModule(), [[0]]).setup("fit")


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
    expected = quiet_trainer(default_root_dir=tmp_path, enable_checkpointing=True).test(model, Stages(), verbose=False)
    loop = FederatedLoop(local_steps=1, out_dir=tmp_path, accelerator="cpu")
    assert loop.test(model, data) == expected[0]
    assert data.batch_size == 5
    assert data.label_counts().sum() == 30


def test_validation_data_of_more_clients_than_there_are():
    class Both(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(classification(12), 3)

        val_dataloader = train_dataloader

    data = FederatedDataModule.from_datamodule(Both(), IIDPartitioner(3), val_clients=IIDPartitioner(4))
    with pytest.raises(ConfigurationError, match=r"a part for `3`, .* no such client\. Divide .* among the 3 clients"):
        data.setup("fit")
