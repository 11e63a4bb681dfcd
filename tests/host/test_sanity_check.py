"""A few batches of validation before the first round, and limits of validation."""

import random

import numpy as np
import pytest
import torch
from lightning import LightningModule
from torchmetrics import MaxMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_feddua import ConfigurationError, FedAvg, FederatedDataModule
from tests.host.parity_modules import labelled
from tests.host.test_trainer_parity import Validated
from tests.modules import Classifier, classification
from tests.trainers import quiet_trainer

TIMED = {"seconds"}


class Remembers(Classifier):
    """Keeps in validation whatever a module can keep, and trains by it."""

    def __init__(self):
        super().__init__()
        self.best = MaxMetric()
        self.accuracy = MulticlassAccuracy(3)
        self.seen = []
        self.count = 0
        self.last = torch.zeros(1)
        self.stages = []

    def on_validation_epoch_start(self):
        self.count += 1

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.best.update(float(self.count))
        self.log("best", self.best.compute())
        self.seen.append(batch_idx)
        self.last.add_(1.0)
        self.log("kept", float(len(self.seen) + self.last))
        random.random(), np.random.rand(), torch.rand(1)


def fitted(make_loop, clients, module, **arguments):
    torch.manual_seed(0)
    module = module()
    loop = make_loop(server=FedAvg(), engine="sequential", **arguments)
    loop.fit(module, clients)
    rows = [{name: value for name, value in row.items() if name not in TIMED} for row in loop.history]
    return module, rows


@pytest.mark.parametrize("ranks", [{}, {"devices": 2, "strategy": "ddp_fork"}])
def test_nothing_of_it_remains(make_loop, clients, ranks):
    results = [fitted(make_loop, clients, Remembers, num_sanity_val_steps=steps, **ranks) for steps in (0, 2, -1)]
    for module, rows in results[1:]:
        assert rows == results[0][1]
        assert all(torch.equal(results[0][0].state_dict()[n], value) for n, value in module.state_dict().items())
        if not ranks:
            assert (module.seen, module.count, module.last) == (results[0][0].seen, 3, results[0][0].last)


@pytest.mark.parametrize(("steps", "expected"), [(0, 0), (1, 1), (2, 2), (-1, 3), (50, 3)])
def test_so_many_batches_before_the_first_round(make_loop, clients, steps, expected):
    batches = []

    class Counts(Classifier):
        def on_train_start(self):
            batches.append("train")

        def validation_step(self, batch, batch_idx):
            assert self.trainer.sanity_checking != self.trainer.validating
            batches.append(self.trainer.sanity_checking)
            return super().validation_step(batch, batch_idx)

    loop = make_loop(num_sanity_val_steps=steps, max_rounds=1, engine="sequential", checkpoint_every=1, server=FedAvg())
    loop.fit(Counts(), clients)
    assert batches[: batches.index("train")] == [True] * expected
    assert batches.count(True) == expected
    assert batches.count(False) == 3
    # Not after a resume.
    batches.clear()
    make_loop(max_rounds=2, checkpoint_every=1, server=FedAvg()).fit(Counts(), clients, loop.run_dir / "last.ckpt")
    assert batches.count(True) == 0


def test_errors_show_before_any_client_trains(make_loop, clients):
    trained = []

    class Broken(Classifier):
        def training_step(self, batch, batch_idx):
            trained.append(batch_idx)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake"):
        make_loop(engine="sequential").fit(Broken(), clients)
    assert trained == []


@pytest.mark.parametrize("arguments", [{"validate_every": 0}, {"limit_val_batches": 0}])
def test_without_validation_there_is_no_check(make_loop, clients, arguments):
    class Broken(Classifier):
        def validation_step(self, batch, batch_idx):
            raise KeyError("a mistake")

    loop = make_loop(max_rounds=1, **arguments)
    loop.fit(Broken(), clients)
    assert not any(name.startswith("val") for name in loop.history[0])


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 3, 100, 0.5, 1.0, None])
def test_limited_validation_is_that_of_trainer(limit, devices, tmp_path, make_loop):
    torch.manual_seed(0)
    module = Validated()
    data = FederatedDataModule({"a": labelled()}, val_dataset=labelled(37), eval_batch_size=8)
    trainer = quiet_trainer(default_root_dir=tmp_path, limit_val_batches=limit)  # fmt: skip
    expected = trainer.validate(module, data, verbose=False)[0]
    strategy = "auto" if devices == 1 else "ddp_fork"
    loop = make_loop(limit_val_batches=limit, devices=devices, strategy=strategy)
    assert loop.validate(module, data) == expected


def test_a_fraction_of_less_than_one_batch(make_loop, clients):
    with pytest.raises(ConfigurationError, match=r"`limit_val_batches=0.1` of 3 batches is less than one\. Give"):
        make_loop(limit_val_batches=0.1).fit(Classifier(), clients)


def test_test_data_is_not_limited(make_loop):
    class Tested(LightningModule):
        def test_step(self, batch, batch_idx):
            self.log("count", float(len(batch[0])), reduce_fx="sum")

    module = Tested()
    module.layer = torch.nn.Linear(1, 1)
    data = FederatedDataModule({"a": classification(5)}, test_dataset=classification(30), eval_batch_size=10)
    assert make_loop(limit_val_batches=1).test(module, data) == {"count": 30.0}
    assert make_loop(fast_dev_run=2).test(module, data) == {"count": 20.0}
