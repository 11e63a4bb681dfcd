"""Clients that are DataLoaders or streams: their own batches, in an order that follows from the run's seed."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from lightning_feddua import ConfigurationError, FedAvg, FederatedDataModule, Mime
from lightning_feddua.data.streams import ClientStream
from tests.modules import Classifier, classification
from tests.trainers import quiet_trainer


class Seen(LightningModule):
    """Remembers the batches of each client."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.automatic_optimization = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        SEEN.append((self.trainer.current_epoch, batch_idx, x.clone()))
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


SEEN = []


@pytest.fixture(autouse=True)
def _forget():
    SEEN.clear()


class Shuffled(IterableDataset):
    """Draws by one of three means; two of them are its own."""

    def __init__(self, means="global", size=10, seed=0):
        self.samples = classification(size, seed)
        self.means = means
        self.numpy = np.random.default_rng(3)
        self.torch = torch.Generator().manual_seed(3)

    def __iter__(self):
        size = len(self.samples)
        if self.means == "numpy":
            order = self.numpy.permutation(size)
        else:
            order = torch.randperm(size, generator=self.torch if self.means == "torch" else None)
        return (self.samples[int(i)] for i in order)


def streams(means="global", **arguments):
    clients = {name: Shuffled(means, 10 + 4 * i, i) for i, name in enumerate("abc")}
    return FederatedDataModule(clients, classification(20), batch_size=4, **arguments)


@pytest.mark.parametrize("means", ["global", "numpy", "torch"])
@pytest.mark.parametrize("work", [{"local_steps": 4}, {"local_epochs": 2}])
def test_streams_follow_from_the_seed_alone(make_loop, means, work):
    def weights(clients_first, ranks=1, **more):
        torch.manual_seed(5)
        model = Classifier(dropout=0.5)
        data = streams(means)
        if clients_first:
            # As if somebody had read the streams before.
            _ = [list(data.clients[name]) for name in "ac"]
        arguments = {"strategy": "ddp_fork", "devices": 2} if ranks == 2 else {}
        loop = make_loop(server=FedAvg(), max_rounds=3, **work, **arguments, **more)
        loop.fit(model, data)
        assert loop.engine_note.startswith("sequential")
        return model.state_dict()

    once, again, two_ranks = weights(False), weights(True), weights(False, ranks=2)
    other = weights(False, seed=1)
    for name, value in once.items():
        assert torch.equal(value, again[name]), name
        assert torch.equal(value, two_ranks[name]), name
    assert not torch.equal(once["net.0.weight"], other["net.0.weight"])


def test_batches_and_passes_of_a_stream(make_loop):
    data = FederatedDataModule({"a": Shuffled(size=10)}, batch_size=4)
    make_loop(max_rounds=2, local_epochs=2, engine="sequential").fit(Seen(), data)
    assert [(epoch, index, len(x)) for epoch, index, x in SEEN[:6]] == [
        *((0, 0, 4), (0, 1, 4), (0, 2, 2), (1, 0, 4), (1, 1, 4), (1, 2, 2))
    ]
    first, second, later = (torch.cat([x for _, _, x in SEEN[i : i + 3]]) for i in (0, 3, 6))
    assert not torch.equal(first, second)
    assert not torch.equal(first, later)
    assert torch.equal(first.sum(0).sort()[0], second.sum(0).sort()[0]) or torch.allclose(first.sum(0), second.sum(0))
    SEEN.clear()
    make_loop(max_rounds=1, local_steps=5, engine="sequential").fit(Seen(), data)
    assert [epoch for epoch, _, _ in SEEN] == [0, 0, 0, 1, 1]


def test_a_loader_gives_its_own_batches(make_loop):
    """Weighted sampling, batches of its own size, and a last one that is dropped."""
    weights = (classification(30).tensors[1] == 1).double().tolist()
    sampler = WeightedRandomSampler(weights, 20)
    clients = {
        "weighted": DataLoader(classification(30), 6, sampler=sampler, drop_last=True),
        "buckets": DataLoader(classification(9), batch_sampler=[[0, 1, 2], [5], [7, 8]]),
    }
    data = FederatedDataModule(clients, batch_size=50)
    make_loop(max_rounds=1, local_epochs=1, engine="sequential").fit(Seen(), data)
    assert sorted(len(x) for _, _, x in SEEN) == [1, 2, 3, 6, 6, 6]
    drawn = torch.cat([x for _, _, x in SEEN if len(x) == 6])
    allowed = classification(30).tensors[0][torch.tensor(weights) > 0]
    assert all((row == allowed).all(1).any() for row in drawn)
    bucket = next(x for _, _, x in SEEN if len(x) == 3)
    assert torch.equal(bucket, classification(9).tensors[0][:3])
    assert data.client_sizes().tolist() == [30, 9]


class InOrder(IterableDataset):
    """Without a length."""

    def __iter__(self):
        return iter(classification(22))


class Scheduled(Classifier):
    """Its epoch scheduler has to know where a pass ends."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2}, {"limit_train_batches": 3}])
@pytest.mark.parametrize("dataset", [classification(22), InOrder()])
def test_a_loader_is_trained_on_as_under_trainer(make_loop, dataset, arguments):
    loader = DataLoader(dataset, 5)
    torch.manual_seed(1)
    ours, theirs = Scheduled(dropout=0.0), Scheduled(dropout=0.0)
    theirs.load_state_dict(ours.state_dict())
    make_loop(server=FedAvg(), max_rounds=1, local_epochs=2, **arguments).fit(ours, {"a": loader})
    trainer = quiet_trainer(max_epochs=2, **arguments)
    trainer.fit(theirs, loader)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_a_stream_makes_as_many_optimizer_steps_as_asked_for(make_loop):
    make_loop(server=FedAvg(), max_rounds=1, local_steps=3, accumulate_grad_batches=2).fit(
        Seen(), {"a": DataLoader(classification(22), 5)}
    )
    assert [(epoch, batch_idx) for epoch, batch_idx, _ in SEEN] == [*((0, i) for i in range(5)), (1, 0)]


def test_a_fraction_of_an_unknown_length_is_refused(make_loop):
    loop = make_loop(local_epochs=1, limit_train_batches=0.5)
    with pytest.raises(ConfigurationError, match=r"unknown length.*`limit_train_batches=0.5`"):
        loop.fit(Seen(), {"a": InOrder()})


@dataclass
class Points:
    x: torch.Tensor
    y: torch.Tensor


class Opaque:
    """A batch that Lightning cannot look into, but can move."""

    def __init__(self, samples):
        self.x, self.y = (torch.stack(part) for part in zip(*samples, strict=True))

    def to(self, device, **kwargs):
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self


class OwnBatches(Classifier):
    def training_step(self, batch, batch_idx):
        assert isinstance(batch, Opaque | Points)
        loss = nn.functional.cross_entropy(self.net(batch.x), batch.y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch.x), batch.y), batch_size=len(batch.y))


def points(samples):
    return Points(*(torch.stack(part) for part in zip(*samples, strict=True)))


@pytest.mark.parametrize("collate", [Opaque, points])
@pytest.mark.parametrize("loaders", [False, True])
def test_own_batch_classes(make_loop, collate, loaders):
    clients = {name: classification(12, seed) for seed, name in enumerate("ab")}
    if loaders:
        clients = {name: DataLoader(data, 4, collate_fn=collate) for name, data in clients.items()}
    data = FederatedDataModule(clients, classification(10), batch_size=4, collate_fn=collate)
    loop = make_loop(max_rounds=2)
    loop.fit(OwnBatches(dropout=0.0), data)
    assert loop.engine_note.startswith("sequential (not vectorized: its ")
    assert {"train_loss", "val_loss"} <= loop.history[0].keys()
    if not loaders:
        with pytest.raises(ConfigurationError, match=rf"batches have a `{collate.__name__.capitalize()}` in them"):
            make_loop(max_rounds=1, engine="vectorized").fit(OwnBatches(dropout=0.0), data)


def test_a_batch_of_unknown_size_is_refused_where_trainer_refuses_it(make_loop):
    class Silent(OwnBatches):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.net(batch.x).mean())

    data = FederatedDataModule({"a": classification(8)}, classification(8), batch_size=4, collate_fn=Opaque)
    with pytest.raises(Exception, match="could not infer the batch_size from the batch"):
        make_loop(max_rounds=1).fit(Silent(), data)


class Once(IterableDataset):
    """Can be read a single time."""

    def __init__(self):
        self.samples = iter(classification(6))

    def __iter__(self):
        return self.samples


def test_what_cannot_work_is_said(make_loop):
    with pytest.raises(ConfigurationError, match=r"Client `a` is a stream that does not tell its number of samples"):
        make_loop(client_weights="samples").fit(Classifier(), streams())
    with pytest.raises(ConfigurationError, match=r"cannot be vectorized: its clients are DataLoaders or streams"):
        make_loop(engine="vectorized").fit(Classifier(), streams())
    with pytest.raises(ConfigurationError, match=r"`Mime` needs the gradient over all samples of a client, and some"):
        make_loop(client=Mime()).fit(Seen(), FederatedDataModule({"a": Shuffled()}))
    with pytest.raises(Exception, match=r"its `Once` gave no batch in pass 1 of the round\. Let `__iter__` start anew"):
        make_loop(local_epochs=2).fit(Classifier(), FederatedDataModule({"a": Once()}, batch_size=3))
    distributed = torch.utils.data.DistributedSampler(classification(6), num_replicas=2, rank=0)
    with pytest.raises(ConfigurationError, match=r"DataLoader of client `a` has a `DistributedSampler`"):
        make_loop().fit(Classifier(), {"a": DataLoader(classification(6), sampler=distributed)})
    with pytest.raises(ConfigurationError, match="cannot be pooled"):
        streams().train_dataloader()


def test_a_lazy_mapping_may_have_streams(make_loop):
    class Made(Mapping):
        def __getitem__(self, name):
            return Shuffled(seed=int(name))

        def __iter__(self):
            return iter("012")

        def __len__(self):
            return 3

    loop = make_loop(max_rounds=1)
    loop.fit(Classifier(dropout=0.0), FederatedDataModule(Made(), batch_size=4))
    assert loop.engine_note == (
        "sequential (not vectorized: its clients are DataLoaders or streams, which are read one after another)"
    )
    with pytest.raises(ConfigurationError, match="cannot be indexed"):
        ClientStream(DataLoader(Shuffled()), 1).batch(np.arange(1))


def test_streams_are_validated_too(make_loop):
    data = streams()
    loop = make_loop()
    model = Classifier()
    assert loop.validate(model, data, per_client=True).keys() == {
        f"{name}/{kind}" for name in ("val_acc", "val_loss") for kind in ("mean", "std", "worst_decile")
    }
    x, y = Shuffled(size=14, seed=1).samples.tensors
    model.eval()
    expected = nn.functional.cross_entropy(model.net(x), y).item()
    assert abs(loop.client_metrics["b"]["val_loss"] - expected) < 1e-6
    assert list(loop.client_metrics) == ["a", "b", "c"]


def test_a_run_on_streams_is_resumed(make_loop):
    def fit(rounds, ckpt_path=None):
        torch.manual_seed(5)
        model = Classifier()
        loop = make_loop(server=FedAvg(), max_rounds=rounds, checkpoint_every=1)
        loop.fit(model, streams("numpy"), ckpt_path)
        return loop, model.state_dict()

    _, whole = fit(4)
    half, _ = fit(2)
    _, resumed = fit(4, half.run_dir / "last.ckpt")
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
