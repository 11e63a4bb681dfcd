"""Callbacks that were written for Trainer, in a federated run."""

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader

from lightning_feddua import ClientError, ConfigurationError, FedAvg, FedDuAdam, FederatedDataModule
from lightning_feddua.checkpoints.files import read
from tests.modules import Classifier, classification
from tests.trainers import quiet_trainer

PACKAGES = [lightning.pytorch, pytorch_lightning]
# Called with every access or only by Trainer's own machinery.
UNRECORDED = {"state_key", "state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint"}


def recorder(package, record):
    """A callback that notes the name of each of its hooks."""

    def noting(name):
        def hook(self, trainer, pl_module, *args, **kwargs):
            assert pl_module.trainer is trainer
            record.append(f"callback {name}")

        return hook

    names = [name for name in dir(package.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
    return type("Recorder", (package.Callback,), {name: noting(name) for name in names if name not in UNRECORDED})()


HOOKS = [
    *("setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start"),
    *("on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_validation_start", "on_validation_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end"),
]


def recording_module(record):
    def noting(name):
        def hook(self, *args, **kwargs):
            record.append(f"module {name}")

        return hook

    return type("Recording", (Classifier,), {name: noting(name) for name in HOOKS})(dropout=0.0)


def data():
    return FederatedDataModule({"a": classification(40)}, classification(30, seed=9), batch_size=20, eval_batch_size=15)


@pytest.mark.parametrize("package", PACKAGES)
def test_hooks_are_called_in_trainers_order(make_loop, tmp_path, package):
    """One client, one round, one pass. Trainer validates inside the last epoch, the loop after the server's step."""
    ours, trainers = [], []
    settings = {"max_rounds": 1, "local_epochs": 1, "server": FedAvg(), "engine": "sequential"}
    settings["num_sanity_val_steps"] = 0
    loop = make_loop(**settings, callbacks=recorder(package, ours))
    loop.fit(recording_module(ours), data())
    trainer = quiet_trainer(
        max_epochs=1, callbacks=recorder(lightning.pytorch, trainers), num_sanity_val_steps=0, default_root_dir=tmp_path
    )
    trainer.fit(
        recording_module(trainers),
        DataLoader(classification(40), batch_size=20),
        DataLoader(classification(30, seed=9), batch_size=15),
    )
    validation = [name for name in trainers if "_validation_" in name]
    training = [name for name in trainers if "_validation_" not in name]
    end = training.index("callback on_fit_end")
    assert ours == [*training[:end], *validation, *training[end:]]


class Counts(lightning.pytorch.Callback):
    """Keeps what Python can keep, in clients and over the run."""

    def __init__(self):
        self.batches, self.seen, self.total, self.tensor = 0, [], {"n": 0}, torch.zeros(1)
        self.validations, self.per_client = 0, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1
        self.seen.append(outputs["loss"].item())
        self.total["n"] += 1
        self.tensor += 1
        assert (self.batches, len(self.seen), self.total["n"], self.tensor.item()) == (batch_idx + 1,) * 4
        self.log("count", float(self.batches))

    def on_validation_epoch_end(self, trainer, pl_module):
        self.validations += 1
        self.log("val_count", float(self.validations))

    def state_dict(self):
        return {"validations": self.validations}

    def load_state_dict(self, state):
        self.validations = state["validations"]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("server", [FedAvg, FedDuAdam])
def test_a_callback_keeps_what_it_sees_over_the_run_but_not_over_clients(make_loop, clients, devices, server):
    ranks = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    callback = Counts()
    loop = make_loop(server=server(), local_epochs=1, callbacks=callback, **ranks)
    loop.fit(Classifier(), clients)
    assert [row["val_count"] for row in loop.history] == [1, 2, 3]
    # The mean over clients of the mean over their samples: 20 + 10, 20 + 20 + 20, 20 + 20 + 20 + 15 and 10.
    expected = (40 / 30 + 120 / 60 + 180 / 75 + 10 / 10) / 4
    assert [row["count"] for row in loop.history] == pytest.approx([expected] * 3)
    assert callback.validations == 3
    assert callback.batches == 0
    # With two ranks, the first has one client, which there is no need to stack.
    reason = "the callback `Counts` has `on_train_batch_end`" if devices == 1 else "too few clients per rank"
    assert reason in loop.engine_note


def test_the_result_does_not_depend_on_the_number_of_ranks(make_loop, clients):
    def weights(**ranks):
        loop = make_loop(callbacks=Counts(), local_epochs=1, **ranks)
        loop.fit(Classifier(), clients)
        return loop.weights, [row["count"] for row in loop.history]

    torch.manual_seed(0)
    (one, counts), (two, others) = weights(), (torch.manual_seed(0), weights(devices=2, strategy="ddp_fork"))[1]
    assert torch.equal(one, two)
    assert counts == others


def test_callbacks_in_local_steps_are_not_vectorized(make_loop, clients):
    with pytest.raises(ConfigurationError, match=r"the callback `Counts` has `on_train_batch_end`\. Use"):
        make_loop(callbacks=Counts(), engine="vectorized").fit(Classifier(), clients)


def test_their_state_is_in_checkpoints_and_resumed(make_loop, clients):
    class Saves(Counts):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint["mine"] = self.validations

        def on_load_checkpoint(self, trainer, pl_module, checkpoint):
            assert checkpoint["mine"] == 2

    loop = make_loop(callbacks=Saves(), max_rounds=2, local_epochs=1)
    loop.fit(Classifier(), clients)
    checkpoint = read(loop.run_dir / "last.ckpt")
    assert checkpoint["callbacks"] == {Saves().state_key: {"validations": 2}}
    callback = Saves()
    make_loop(callbacks=callback, max_rounds=3, local_epochs=1).fit(Classifier(), clients, ckpt_path="last")
    assert callback.validations == 3


@pytest.mark.parametrize("package", PACKAGES)
def test_exceptions_and_lambdas(make_loop, clients, package):
    seen = []
    callback = package.callbacks.LambdaCallback(
        setup=lambda trainer, pl_module, stage: seen.append(stage),
        on_exception=lambda trainer, pl_module, exception: seen.append(type(exception)),
        teardown=lambda trainer, pl_module, stage: seen.append("teardown"),
        on_test_start=lambda trainer, pl_module: seen.append("test start"),
    )

    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            raise ValueError("no")

        def test_step(self, batch, batch_idx):
            return None

    loop = make_loop(callbacks=[callback])
    with pytest.raises(ClientError):
        loop.fit(Fails(), clients)
    assert seen == ["fit", ClientError, "teardown"]
    seen.clear()
    clients.test_dataset = classification(10)
    loop.test(Fails(), clients)
    assert seen == ["test", "test start", "teardown"]


class Hooked(Classifier):
    """Brings its own callbacks."""

    def __init__(self, configured):
        super().__init__()
        self.__dict__["configured"] = configured

    def configure_callbacks(self):
        assert self.trainer.max_rounds == 0
        return self.configured


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_may_bring_callbacks(make_loop, clients, package):
    """One or several, called or translated; they replace those of the same class."""
    stopping = package.callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0)
    given = package.callbacks.EarlyStopping("nothing")
    seen = []
    counts = package.callbacks.LambdaCallback(
        on_fit_start=lambda trainer, pl_module: seen.extend(map(type, trainer.callbacks))
    )
    loop = make_loop(max_rounds=5, callbacks=[given, counts])
    loop.fit(Hooked([stopping]), clients)
    assert len(loop.history) == 2
    assert stopping.stopped_epoch == 1
    assert seen == [type(counts), type(stopping)]
    loop = make_loop(max_rounds=5, callbacks=[counts])
    loop.fit(Hooked(stopping), clients)
    assert len(loop.history) == 2
    loop.fit(Hooked([]), clients)
    assert len(loop.history) == 5


def test_what_is_no_callback_is_refused(make_loop):
    with pytest.raises(ConfigurationError, match=r"The callback is `1`\. Give a `FederatedCallback` or a"):
        make_loop(callbacks=[1])


@pytest.mark.parametrize("server", [FedAvg, FedDuAdam])
def test_a_callback_that_changes_batches_does_so_for_every_iterate(make_loop, clients, server):
    class Scales(lightning.pytorch.Callback):
        """Prepares batches, as the modules of some packages leave it to a callback."""

        batches = 0

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            batch[0].mul_(0.01)

        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            self.batches += 1
            batch[0].mul_(0.01)

    class Checks(Classifier):
        def validation_step(self, batch, batch_idx):
            assert batch[0].abs().max() < 0.1
            super().validation_step(batch, batch_idx)

    callback = Scales()
    make_loop(server=server(), callbacks=callback, max_rounds=2, num_sanity_val_steps=0).fit(Checks(), clients)
    batches = -(-len(clients.val_dataset) // clients.eval_batch_size)
    # What it sees of the last iterate is undone.
    assert callback.batches == 2 * batches
