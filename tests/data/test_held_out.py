"""A part of each client's samples is held out for validation."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_feddua import ConfigurationError, FederatedDataModule
from lightning_feddua.data import DirichletPartitioner, IIDPartitioner
from tests.modules import Classifier, classification


def rows_of(dataset):
    return {tuple(x.tolist()) for x, _ in dataset}


class Lazy(Mapping):
    ids = ("a", "b")
    made = 0

    def __getitem__(self, name):
        Lazy.made += 1
        return classification({"a": 30, "b": 7}[name], seed=ord(name))

    def __iter__(self):
        return iter(self.ids)

    def __len__(self):
        return 2


@pytest.mark.parametrize("kind", ["dict", "partition", "lazy"])
def test_the_parts_are_disjoint_and_complete(kind):
    if kind == "dict":
        whole = {name: classification(size, seed=ord(name)) for name, size in (("a", 30), ("b", 7))}
        data = FederatedDataModule(whole, val_clients=0.2)
    elif kind == "lazy":
        whole, before = Lazy(), Lazy.made
        data = FederatedDataModule(whole, val_clients=0.2)
        assert Lazy.made == before
    else:
        dataset = classification(37)
        whole = FederatedDataModule.from_dataset(dataset, {"a": range(30), "b": range(30, 37)}).clients
        data = FederatedDataModule.from_dataset(dataset, {"a": range(30), "b": range(30, 37)}, val_clients=0.2)
    assert data.client_sizes().tolist() == [24, 6]
    for name in ("a", "b"):
        train, held_out = rows_of(data.clients[name]), rows_of(data.val_clients[name])
        assert not train & held_out
        assert train | held_out == rows_of(whole[name])
    if kind != "lazy":
        assert rows_of(data.val_dataset) == rows_of(data.val_clients["a"]) | rows_of(data.val_clients["b"])


def test_a_clients_split_is_its_own():
    def split(names, **more):
        clients = {name: classification(20, seed=ord(name)) for name in names}
        return FederatedDataModule(clients, val_clients=0.25, **more).val_clients["b"]

    assert rows_of(split("abc")) == rows_of(split("cb"))
    assert rows_of(split("abc")) != rows_of(split("abc", split_seed=1))


def test_it_is_validated(make_loop):
    clients = {name: classification(20, seed=ord(name)) for name in "abc"}
    data = FederatedDataModule(clients, batch_size=5, val_clients=0.25)
    loop, model = make_loop(max_rounds=1), Classifier(dropout=0.0)
    loop.fit(model, data)
    assert "val_loss" in loop.history[0]
    loop.validate(model, data, per_client=True)
    model.eval()
    x, y = (torch.stack(part) for part in zip(*data.val_clients["b"], strict=True))
    expected = torch.nn.functional.cross_entropy(model.net(x), y).item()
    assert loop.client_metrics["b"]["val_loss"] == pytest.approx(expected, rel=1e-6)


def test_fractions_that_cannot_be():
    for fraction in (0.0, 1.0, True, -0.1):
        with pytest.raises(ConfigurationError, match="is not a fraction of a client's samples"):
            FederatedDataModule({"a": classification(4)}, val_clients=fraction)
    with pytest.raises(ConfigurationError, match="Client `b` has 1 samples, of which none can be held out"):
        FederatedDataModule({"a": classification(4), "b": classification(1)}, val_clients=0.5)
    with pytest.raises(ConfigurationError, match="is a `DataLoader`, of which no part can be held out"):
        FederatedDataModule({"a": DataLoader(classification(4))}, val_clients=0.5)


class Both(LightningDataModule):
    def __init__(self, weights=None, val=True):
        super().__init__()
        self.weights, self.val = weights, val

    def train_dataloader(self):
        sampler = None if self.weights is None else WeightedRandomSampler(self.weights, 60)
        return DataLoader(classification(60), 5, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(classification(40, 1), 8) if self.val else []


class OwnCollation(Both):
    def train_dataloader(self):
        return DataLoader(classification(60), 5, collate_fn=lambda samples: "training")


def test_validation_data_of_a_data_module_is_divided(make_loop):
    data = FederatedDataModule.from_datamodule(
        Both(), DirichletPartitioner(4, 1.0), val_clients=DirichletPartitioner(4, 1.0)
    )
    loop = make_loop(max_rounds=1)
    loop.fit(Classifier(), data)
    assert len(data.val_clients) == 4
    assert sum(len(data.val_clients[name]) for name in data.client_ids) == 40
    assert set().union(*(rows_of(data.val_clients[name]) for name in data.client_ids)) == rows_of(classification(40, 1))
    loop.validate(Classifier(), data, per_client=True)
    # Held-out samples are collated as validation data, and not as training data.
    flipped = FederatedDataModule.from_datamodule(OwnCollation(), IIDPartitioner(2), val_clients=IIDPartitioner(2))
    loop.validate(Classifier(), flipped, per_client=True)
    assert flipped.read(flipped.clients["0"]).batch(np.arange(2)) == "training"
    with pytest.raises(ConfigurationError, match="divides the validation data of `Both`, which is 0 loaders"):
        FederatedDataModule.from_datamodule(Both(val=False), IIDPartitioner(4), val_clients=IIDPartitioner(4)).setup(
            "fit"
        )


@pytest.mark.parametrize("val", [True, False])
def test_a_fraction_of_a_data_modules_training_data(make_loop, val):
    data = FederatedDataModule.from_datamodule(Both(val=val), IIDPartitioner(4), val_clients=0.2)
    loop = make_loop(max_rounds=1)
    loop.fit(Classifier(), data)
    assert data.client_sizes().tolist() == [12] * 4
    (validation,) = data.evaluation_data("validation")
    assert len(validation.data) == (40 if val else 12)
    assert "val_loss" in loop.history[0]


def test_a_weighted_sampler_keeps_its_weights(make_loop):
    """Rows of weight zero are never drawn, and a client has its share of the draws."""
    weights = (np.arange(60) % 3 == 0).astype(float)
    data = FederatedDataModule.from_datamodule(Both(weights.tolist()), {"a": range(20), "b": range(20, 60)})
    seen = []

    class Sees(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append(batch[0].clone())

    def weights_of(**arguments):
        torch.manual_seed(0)
        model = Sees(dropout=0.0)
        make_loop(max_rounds=2, local_epochs=1, **arguments).fit(model, data)
        return model.state_dict()

    one = weights_of()
    assert len(seen) == 2 * (4 + 8)
    allowed = {tuple(row) for row in classification(60).tensors[0][weights > 0].tolist()}
    assert {tuple(row) for row in torch.cat(seen).tolist()} <= allowed
    two = weights_of(strategy="ddp_fork", devices=2)
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
    assert data.label_counts().sum() == 60
