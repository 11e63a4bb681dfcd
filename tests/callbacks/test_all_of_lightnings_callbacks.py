"""Each callback that Lightning ships works in a federated run, or is refused in a sentence with its replacement."""

from datetime import timedelta

import lightning.pytorch
import pytest
import pytorch_lightning
import torch

from lightning_feddua import ConfigurationError, FedAvg
from lightning_feddua.callbacks.lightning import IGNORED, TRANSLATED
from lightning_feddua.callbacks.lightning_refusals import REFUSED
from tests.modules import Classifier

PACKAGES = [lightning.pytorch, pytorch_lightning]
# What is called as any callback of a user's own.
CALLED = {"Callback", "Checkpoint", "LambdaCallback", "ModelSummary", "RichModelSummary"}
ARGUMENTS = {
    "EarlyStopping": {"monitor": "val_loss"},
    "GradientAccumulationScheduler": {"scheduling": {0: 4, 3: 2}},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
    "OnExceptionCheckpoint": {"dirpath": "."},
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "ThroughputMonitor": {"batch_size_fn": len},
}


def known(package, name):
    """By which of the tables a class is known, through one of its bases."""
    cls = getattr(package.callbacks, name)
    tables = {"refused": REFUSED, "translated": TRANSLATED, "ignored": IGNORED}
    for table, bases in tables.items():
        if any(issubclass(cls, getattr(package.callbacks, base)) for base in bases):
            return table
    return "called" if name in CALLED else None


@pytest.mark.parametrize("package", PACKAGES)
def test_none_is_forgotten(package):
    assert [name for name in package.callbacks.__all__ if known(package, name) is None] == []


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", lightning.pytorch.callbacks.__all__)
def test_it_works_or_says_what_to_use_instead(make_loop, clients, package, name):
    callback = getattr(package.callbacks, name)(**ARGUMENTS.get(name, {}))
    if known(package, name) == "refused":
        with pytest.raises(
            ConfigurationError, match=rf"^The callback `{name}` .*\. (Use|Choose|Write|Freeze|Prune) .*`"
        ):
            make_loop(callbacks=[callback])
        return
    loop = make_loop(callbacks=[callback], server=FedAvg(), max_rounds=2)
    loop.fit(Classifier(), clients)
    assert len(loop.history) == 2


def test_the_replacement_has_the_callbacks_argument(make_loop):
    callback = lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 4})
    with pytest.raises(ConfigurationError, match=r"Use `FederatedLoop\(accumulate_grad_batches=4\)`"):
        make_loop(callbacks=callback)


def test_a_summary_is_printed(make_loop, clients, caplog):
    with caplog.at_level("INFO"):
        make_loop(callbacks=lightning.pytorch.callbacks.ModelSummary(), max_rounds=1).fit(Classifier(), clients)
    assert "Trainable params" in caplog.text


def test_a_progress_bar_is_left_to_the_loop(make_loop, clients, caplog):
    class Mine(lightning.pytorch.callbacks.TQDMProgressBar):
        pass

    with caplog.at_level("INFO"):
        make_loop(callbacks=[Mine()])
    assert "The callback `Mine` is not used: the loop has a progress bar of its own." in caplog.text


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_timer_ends_the_run(make_loop, clients, package, devices):
    ranks = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    timer = package.callbacks.Timer(duration=timedelta(seconds=1))
    loop = make_loop(callbacks=timer, max_rounds=100_000, **ranks)
    loop.fit(Classifier(), clients)
    assert 0 < len(loop.history) < 100_000
    if devices == 1:
        assert 1 <= timer.time_elapsed("train") < 20
        assert timer.time_elapsed("validate") > 0
    # Its time is over after another round.
    rounds = len(loop.history)
    again = package.callbacks.Timer(duration=timedelta(seconds=1))
    resumed = make_loop(callbacks=again, max_rounds=100_000, **ranks)
    resumed.fit(Classifier(), clients, ckpt_path="last")
    assert len(resumed.history) == rounds + 1


@pytest.mark.parametrize("package", PACKAGES)
def test_learning_rates_are_columns_of_the_history(make_loop, clients, package):
    class Groups(Classifier):
        def configure_optimizers(self):
            parameters = list(self.parameters())
            groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.2}]
            optimizer = torch.optim.SGD(groups, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    monitor = package.callbacks.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    loop = make_loop(callbacks=monitor, local_lr_decay=0.5)
    loop.fit(Groups(), clients)
    assert [row["lr-SGD/pg1"] for row in loop.history] == [0.1, 0.05, 0.025]
    assert [row["lr-SGD/pg2"] for row in loop.history] == [0.2, 0.1, 0.05]
    assert loop.history[0]["lr-SGD/pg1-momentum"] == 0.9
    assert loop.history[0]["lr-SGD/pg1-weight_decay"] == 0.0
    assert monitor.lrs["lr-SGD/pg1"] == [0.1, 0.05, 0.025]
    loop = make_loop(callbacks=package.callbacks.LearningRateMonitor(), max_rounds=1)
    loop.fit(Classifier(), clients)
    assert loop.history[0]["lr-Adam"] == 0.01


def test_a_subclass_whose_methods_would_not_be_called_is_refused(make_loop):
    class Mine(lightning.pytorch.callbacks.EarlyStopping):
        def on_validation_end(self, trainer, pl_module):
            pass

    class Renamed(lightning.pytorch.callbacks.EarlyStopping):
        def __init__(self):
            super().__init__("val_loss")

    with pytest.raises(ConfigurationError, match=r"`Mine` changes `on_validation_end` of `EarlyStopping`.*\. Use"):
        make_loop(callbacks=Mine("val_loss"))
    make_loop(callbacks=Renamed())
