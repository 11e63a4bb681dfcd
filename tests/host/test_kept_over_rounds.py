"""What a module keeps over rounds for itself: as under Trainer, where a round is an epoch."""

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_feddua import FedAvg, FedDuAdam, FederatedDataModule
from tests.modules import classification


class Template(LightningModule):
    """The module of the lightning-hydra-template, on other data."""

    def __init__(self, lr=0.3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(4, 3)
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc, self.val_acc = MulticlassAccuracy(3), MulticlassAccuracy(3)
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def on_train_start(self):
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.net(x)
        return self.criterion(logits, y), logits.argmax(1), y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        acc = self.val_acc.compute()
        self.val_acc_best(acc)
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), self.hparams.lr)


def data(number=4):
    clients = {str(i): classification(20, seed=i) for i in range(number)}
    return FederatedDataModule(clients, classification(45, seed=99), batch_size=5, eval_batch_size=8)


@pytest.mark.parametrize("server", [FedAvg, FedDuAdam])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_best_accuracy_so_far(make_loop, server, ranks):
    # So large a rate that accuracy goes up and down.
    model = Template(lr=30.0)
    arguments = {"devices": ranks, "strategy": "ddp_fork"} if ranks > 1 else {}
    loop = make_loop(server=server(), max_rounds=12, clients_per_round=2, **arguments)
    loop.fit(model, data())
    found = [row["val/acc"] for row in loop.history]
    best = [max(found[: i + 1]) for i in range(len(found))]
    assert [row["val/acc_best"] for row in loop.history] == best
    # The test would tell nothing if each were better than all before, or the second iterate never better.
    assert best != found
    if server is FedDuAdam:
        others = [row["last_iterate/val/acc"] for row in loop.history]
        assert any(other > best[i] for i, other in enumerate(others))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_best_accuracy_is_resumed(make_loop, tmp_path, ranks):
    arguments = {"server": FedDuAdam(), "checkpoint_every": 1, "out_dir": tmp_path / str(ranks)}
    if ranks > 1:
        arguments |= {"devices": ranks, "strategy": "ddp_fork"}
    make_loop(max_rounds=4, **arguments).fit(Template(lr=30.0), data())
    # A round that is worse than the best before it tells the difference.
    loop = make_loop(max_rounds=8, **arguments)
    loop.fit(Template(lr=30.0), data(), "last")
    found = [row["val/acc"] for row in loop.history]
    best = [max(found[: i + 1]) for i in range(len(found))]
    assert len(found) == 8
    assert found[4] < best[3]
    assert [row["val/acc_best"] for row in loop.history] == best


class KeepsOutputs(Template):
    """Keeps what each batch gave, and does nothing with it at the end: ranks would keep their own batches alone."""

    on_validation_epoch_end = LightningModule.on_validation_epoch_end

    def __init__(self):
        super().__init__()
        self.sizes = []

    def validation_step(self, batch, batch_idx):
        self.sizes.append(len(batch[0]))
        self.log("val/seen", float(sum(self.sizes)), reduce_fx="max")
        self.log("val/loss", self.model_step(batch)[0])


def test_what_validation_keeps_is_the_same_on_all_ranks(make_loop):
    histories = []
    for arguments in ({}, {"devices": 2, "strategy": "ddp_fork"}):
        torch.manual_seed(0)
        loop = make_loop(server=FedDuAdam(), max_rounds=2, **arguments)
        loop.fit(KeepsOutputs(), data())
        histories.append([{k: v for k, v in row.items() if k != "seconds"} for row in loop.history])
    assert histories[0] == histories[1]
    assert [row["val/seen"] for row in histories[0]] == [45, 90]


def test_each_client_is_validated_from_the_same_state(make_loop):
    loop = make_loop()
    found = loop.validate(KeepsOutputs(), data(), per_client=True)
    assert (found["val/seen/mean"], found["val/seen/std"]) == (20, 0)


class Calibrated(Template):
    """Sets a threshold in validation, which is a part of the model; its batches leave a mark, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("threshold", torch.tensor(float("nan")))
        self.register_buffer("largest", torch.zeros(()))

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.largest.copy_(torch.maximum(self.largest, batch[0].max()))
        # A new tensor, which inference mode makes.
        self.threshold = self.net(batch[0]).mean()


@pytest.mark.parametrize("server", [FedAvg, FedDuAdam])
@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_that_validation_sets_are_kept(make_loop, server, ranks):
    torch.manual_seed(0)
    module, clients = Calibrated(), data()
    arguments = {"devices": 2, "strategy": "ddp_fork"} if ranks == 2 else {}
    loop = make_loop(server=server(), max_rounds=2, local_steps=2, checkpoint_every=1, **arguments)
    loop.fit(module, clients)
    # What was validated last: of two iterates, the average.
    checkpoint = torch.load(loop.run_dir / "last.ckpt", weights_only=True)
    weights = checkpoint.get("averaged_state_dict", checkpoint["state_dict"])
    validated = Template()
    validated.load_state_dict({name: value for name, value in weights.items() if name in validated.state_dict()})
    x = clients.val_dataset.tensors[0]
    last_batch = x[(len(x) - 1) // clients.eval_batch_size * clients.eval_batch_size :]
    assert torch.equal(module.threshold, validated.net(last_batch).mean().detach())
    assert torch.equal(module.largest, x.max())
    assert torch.equal(checkpoint["state_dict"]["threshold"], module.threshold)
