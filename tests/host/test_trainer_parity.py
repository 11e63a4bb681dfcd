"""The same module under Lightning's Trainer and as the only client of a federation: same batches, same seed."""

import copy

import numpy as np
import pytest
import torch
from lightning import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_feddua import FedAvg, FederatedCallback, FederatedDataModule, FederatedLoop
from lightning_feddua.data.client_data import minibatches
from lightning_feddua.randomness import Purpose, generator, seed_generators
from tests.host.parity_modules import (
    CASES,
    BatchNormAndDropout,
    Common,
    DictOutput,
    ManualDictOutput,
    Metrics,
    labelled,
)
from tests.trainers import quiet_trainer

CPU = torch.device("cpu")
BATCH = 8


class SeedAtStart(Callback):
    """Seeds as the loop does, after everything that Trainer draws before the first step."""

    def on_train_start(self, trainer, module):
        seed_generators(0, 0, 0, Purpose.LOCAL_STEPS, CPU)


def trained_by_trainer(module, dataset, steps, tmp_path, **arguments):
    order = minibatches(len(dataset), BATCH, generator(0, 0, 0, Purpose.MINIBATCHES), steps=steps)
    epochs = {}
    for epoch, positions in order:
        epochs.setdefault(epoch, []).append(positions.tolist())

    class Order:
        """A batch sampler that gives each pass its own order."""

        def __init__(self):
            self.passes = iter(epochs.values())

        def __iter__(self):
            return iter(next(self.passes))

        def __len__(self):
            return len(dataset) // BATCH

    loader = DataLoader(dataset, batch_sampler=Order(), generator=torch.Generator())
    trainer = quiet_trainer(
        max_steps=steps * getattr(module, "steps_per_batch", 1),
        max_epochs=-1,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[SeedAtStart()],
        default_root_dir=tmp_path,
        **arguments,
    )
    trainer.fit(module, loader)
    return module.state_dict(), trainer


class Keep(FederatedCallback):
    def __init__(self):
        self.states = []

    def on_client_end(self, loop):
        self.states.append({name: value.clone() for name, value in loop.module.state_dict().items()})


def trained_by_loop(module, dataset, steps, tmp_path, **arguments):
    keep = Keep()
    loop = FederatedLoop(
        server=FedAvg(),
        max_rounds=1,
        local_steps=steps,
        callbacks=[keep],
        accelerator="cpu",
        out_dir=tmp_path,
        enable_progress_bar=False,
        **arguments,
    )
    loop.fit(module, FederatedDataModule({"only": dataset}, batch_size=BATCH))
    return keep.states[0], loop


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_trainer(case, tmp_path):
    make, dataset, arguments = CASES[case]
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    start = copy.deepcopy(ours.state_dict())
    steps = 2 * len(dataset) // BATCH + 1
    expected, _ = trained_by_trainer(theirs, dataset, steps, tmp_path, **arguments)
    state, loop = trained_by_loop(ours, dataset, steps, tmp_path, **arguments)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
        # The model that is left is that of the only client, to the bit.
        assert torch.equal(ours.state_dict()[name], value), name
    assert any(not torch.equal(state[name], value) for name, value in start.items())
    if make is Metrics:
        assert {"accuracy", "c_MulticlassAccuracy", "c_MulticlassF1Score"} <= loop.history[0].keys()


@pytest.mark.parametrize(
    "arguments",
    [{"devices": 2, "strategy": "ddp_fork"}, {"client_weights": "samples"}, {"lanes": None}, {"engine": "sequential"}],
)
def test_the_model_that_is_left_is_that_of_trainer(arguments, tmp_path):
    torch.manual_seed(0)
    ours = BatchNormAndDropout()
    theirs = copy.deepcopy(ours)
    expected, _ = trained_by_trainer(theirs, labelled(), 7, tmp_path)
    loop = FederatedLoop(
        server=FedAvg(), max_rounds=1, local_steps=7, accelerator="cpu", out_dir=tmp_path, enable_progress_bar=False,
        **arguments,
    )  # fmt: skip
    loop.fit(ours, FederatedDataModule({"only": labelled()}, batch_size=BATCH))
    for name, value in expected.items():
        assert torch.equal(ours.state_dict()[name], value), name


class Doubles(FederatedCallback):
    def on_aggregate_end(self, loop, update):
        update.mean_delta.mul_(2)


def test_an_update_that_was_changed_is_not_replaced_by_the_clients_weights(tmp_path):
    finals = {}
    for name, callbacks in {"plain": [], "doubled": [Doubles()]}.items():
        torch.manual_seed(0)
        model = Common()
        start = copy.deepcopy(model.state_dict())
        loop = FederatedLoop(
            server=FedAvg(), max_rounds=1, local_steps=3, accelerator="cpu", out_dir=tmp_path,
            enable_progress_bar=False, callbacks=callbacks,
        )  # fmt: skip
        loop.fit(model, FederatedDataModule({"only": labelled()}, batch_size=BATCH))
        finals[name] = {key: value - start[key] for key, value in model.state_dict().items()}
    for key, value in finals["plain"].items():
        torch.testing.assert_close(finals["doubled"][key], 2 * value, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("make", [Common, DictOutput, ManualDictOutput])
def test_batch_ends_with_what_trainer_hands_over(make, tmp_path):
    seen = {"theirs": [], "ours": []}

    class Watches(make):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen[self.who].append({name: float(value) for name, value in outputs.items()})
            assert "loss" not in outputs or not outputs["loss"].requires_grad

        def on_train_epoch_end(self):
            seen[self.who].append("train_loss" in self.trainer.callback_metrics)

    torch.manual_seed(0)
    ours = Watches()
    theirs = copy.deepcopy(ours)
    ours.who, theirs.who = "ours", "theirs"
    trained_by_trainer(theirs, labelled(), 6, tmp_path)
    trained_by_loop(ours, labelled(), 6, tmp_path)
    assert seen["ours"] == seen["theirs"]
    assert len(seen["ours"]) == 6 + 2


def test_fedavg_is_the_average_of_trainers(tmp_path):
    """Three clients, each trained by its own Trainer from the same start."""
    torch.manual_seed(0)
    model = Common()
    clients = {str(i): TensorDataset(*(t + i for t in labelled().tensors[:1]), labelled().tensors[1]) for i in range(3)}
    states = []
    for i, dataset in enumerate(clients.values()):
        start = copy.deepcopy(model)
        order = minibatches(24, BATCH, generator(0, 0, i, Purpose.MINIBATCHES), steps=3)
        loader = DataLoader(dataset, batch_sampler=[p.tolist() for _, p in order])
        trainer = quiet_trainer(max_steps=3, default_root_dir=tmp_path)  # fmt: skip
        trainer.fit(start, loader)
        states.append(start.state_dict())
    loop = FederatedLoop(server=FedAvg(), max_rounds=1, local_steps=3, accelerator="cpu", out_dir=tmp_path,
                         enable_progress_bar=False)  # fmt: skip
    loop.fit(model, FederatedDataModule(clients, batch_size=BATCH))
    for name, value in model.state_dict().items():
        mean = torch.stack([state[name].double() for state in states]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)


class Validated(Common):
    """Everything that people log in validation."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.collection = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)], prefix="v_")
        self.by_hand = MulticlassAccuracy(3)

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]), on_epoch=True, sync_dist=True)
        self.accuracy(logits, batch[1])
        self.log("val_acc", self.accuracy)
        self.collection.update(logits, batch[1])
        self.log_dict(self.collection)
        self.by_hand.update(logits, batch[1])
        self.log("weighted", float(batch_idx), batch_size=batch_idx + 1)
        self.log("count", float(len(batch[0])), reduce_fx="sum")
        self.log("largest", batch[0].max(), reduce_fx=torch.max)
        self.log("smallest", batch[0].min(), reduce_fx="min")

    test_step = validation_step


class ValidatedByHand(Validated):
    """Gathers outputs, computes and logs around the batches, as many modules do."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def on_validation_model_eval(self):
        self.eval()
        self.net.train()

    def on_validation_epoch_start(self):
        self.log("first", 3.0)
        self.log("mode", float(self.net.training))

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.outputs.append(self.net(batch[0]).mean())

    def on_validation_epoch_end(self):
        self.log("by_hand", self.by_hand.compute())
        self.log("gathered", torch.stack(self.outputs).mean())
        self.log("seen_loss", self.trainer.callback_metrics["val_loss"])
        self.log("seen_acc", self.trainer.callback_metrics["val_acc"])
        self.by_hand.reset()
        self.outputs.clear()


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("size", [37, 8])
@pytest.mark.parametrize("make", [Validated, ValidatedByHand])
def test_validation_is_identical_to_trainer(devices, size, make, tmp_path):
    torch.manual_seed(0)
    module = make()
    data = FederatedDataModule({"a": labelled()}, val_dataset=labelled(size), eval_batch_size=8)
    trainer = quiet_trainer(default_root_dir=tmp_path)  # fmt: skip
    expected = trainer.validate(module, data, verbose=False)[0]
    strategy = "auto" if devices == 1 else "ddp_fork"
    loop = FederatedLoop(local_steps=1, devices=devices, strategy=strategy, accelerator="cpu", out_dir=tmp_path)
    assert loop.validate(module, data) == expected
    assert len(expected) == (8 if make is Validated else 14)


def test_test_step_and_clients(tmp_path):
    torch.manual_seed(0)
    module = Validated()
    data = FederatedDataModule(
        {str(i): labelled(10 + i) for i in range(20)}, test_dataset=labelled(30), eval_batch_size=8
    )
    trainer = quiet_trainer(default_root_dir=tmp_path)  # fmt: skip
    expected = trainer.test(module, data, verbose=False)[0]
    loop = FederatedLoop(local_steps=1, accelerator="cpu", out_dir=tmp_path)
    assert loop.test(module, data) == expected

    losses, accuracies = [], []
    for dataset in data.clients.values():
        x, y = dataset.tensors
        logits = module.net(x)
        losses.append(nn.functional.cross_entropy(logits, y).item())
        accuracies.append((logits.argmax(1) == y).double().mean().item())
    for devices in (1, 2):
        strategy = "auto" if devices == 1 else "ddp_fork"
        loop = FederatedLoop(local_steps=1, devices=devices, strategy=strategy, accelerator="cpu", out_dir=tmp_path)
        result = loop.validate(module, data, per_client=True)
        assert result["val_loss/mean"] == pytest.approx(np.mean(losses), rel=1e-6)
        assert result["val_loss/std"] == pytest.approx(np.std(losses), rel=1e-4)
        assert result["val_loss/worst_decile"] == pytest.approx(np.sort(losses)[-2:].mean(), rel=1e-6)
        assert result["val_acc/worst_decile"] == pytest.approx(np.sort(accuracies)[:2].mean(), rel=1e-6)
