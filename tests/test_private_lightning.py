"""Canaries of the private names of lightning, torchmetrics, jsonargparse and datasets."""

from datetime import timedelta
from pathlib import Path

import datasets
import jsonargparse
import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.demos.boring_classes import BoringModel
from pytorch_lightning import Trainer as OtherTrainer
from pytorch_lightning.demos.boring_classes import BoringModel as OtherBoringModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchmetrics import MeanMetric

from lightning_feddua import _private


@pytest.mark.parametrize(
    ("name", "starts", "method"), [("ddp_fork", True, "fork"), ("ddp", False, "popen"), ("auto", False, None)]
)
def test_how_strategies_start_processes(name, starts, method):
    strategy = Fabric(accelerator="cpu", strategy=name, devices=1 if name == "auto" else 2).strategy
    assert _private.starts_processes(strategy) is starts
    assert _private.start_method(strategy) == method


def test_spawning_strategies_are_told_apart():
    strategy = Fabric(accelerator="cpu", strategy="ddp_spawn", devices=2).strategy
    assert _private.start_method(strategy) == "spawn"


def test_the_timeout_of_a_strategy_reaches_its_process_group(monkeypatch):
    environment = LightningEnvironment()
    strategy = DDPStrategy(CPUAccelerator(), [torch.device("cpu")], environment)
    assert isinstance(_private.process_group_timeout(strategy), timedelta)
    assert _private.process_group_timeout(SingleDeviceStrategy()) is None
    _private.set_process_group_timeout(strategy, timedelta(seconds=7))
    assert _private.process_group_backend(strategy) == "gloo"
    found = {}
    monkeypatch.setattr("lightning.fabric.strategies.ddp._init_dist_connection", lambda *a, **k: found.update(k))
    strategy.setup_environment()
    assert found["timeout"] == timedelta(seconds=7)


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_when_a_model_checkpoint_saves(package):
    kind = package.callbacks.ModelCheckpoint
    assert _private.checkpoint_triggers(kind()) == (0, None)
    assert _private.checkpoint_triggers(kind(every_n_train_steps=3)) == (3, None)
    assert _private.checkpoint_triggers(kind(train_time_interval=timedelta(1))) == (0, timedelta(1))


def test_the_trainer_of_a_module_can_be_asked_for_when_there_is_none():
    module = BoringModel()
    assert _private.trainer_of(module) is None
    with pytest.raises(RuntimeError, match="not attached"):
        module.trainer  # noqa: B018
    module.trainer = trainer = type("View", (), {})()
    assert _private.trainer_of(module) is trainer
    assert _private.trainer_of(LightningDataModule()) is None


def test_what_a_module_asks_its_trainer_for():
    asked = []

    class View:
        barebones = False
        loggers = ()

        def __getattr__(self, name):
            asked.append(name)
            raise RuntimeError(name)

    class Strategy:
        pass

    module = BoringModel()
    module.trainer = View()
    with pytest.raises(RuntimeError, match=_private.TRAINER_RESULTS):
        module.log("x", 1.0)
    assert asked[-1] == _private.TRAINER_RESULTS
    View.strategy = Strategy()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    setattr(Strategy, _private.STRATEGY_OPTIMIZERS, [optimizer])
    assert module.optimizers() is optimizer


class Hparams(LightningModule):
    def __init__(self, settings):
        super().__init__()
        self.save_hyperparameters(settings)


def test_the_name_of_hyperparameters():
    assert _private.hparams_name(Hparams({"a": 1})) == "settings"
    assert _private.hparams_name(BoringModel()) is None


@pytest.mark.parametrize("boring_model", [BoringModel, OtherBoringModel])
def test_optimizers_and_schedulers_are_parsed(boring_model):
    module = boring_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    config = {"scheduler": scheduler, "interval": "step", "frequency": 3}
    configured = {"optimizer": optimizer, "lr_scheduler": config}
    optimizers, schedulers, monitor = _private.parse_optimizers(configured, module)
    assert optimizers == [optimizer]
    assert monitor is None
    (parsed,) = _private.parse_schedulers(schedulers, monitor, module)
    assert (parsed.scheduler, parsed.interval, parsed.frequency) == (scheduler, "step", 3)
    assert _private.parse_optimizers([optimizer], module) == ([optimizer], [], None)
    module.automatic_optimization = False
    (parsed,) = _private.parse_schedulers([scheduler], None, module)
    assert parsed.scheduler is scheduler


def test_a_scheduler_of_unknown_kind_is_refused():
    with pytest.raises(Exception, match="`object` is invalid"):
        _private.parse_schedulers([{"scheduler": object()}], None, BoringModel())


def test_a_wrapped_optimizer_steps_through_the_strategy():
    class Strategy:
        def optimizer_step(self, optimizer, closure, **kwargs):
            return optimizer, closure()

    optimizer, strategy = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1), Strategy()
    wrapped = _private.wrap_optimizer(optimizer, strategy, BoringModel())
    assert isinstance(wrapped, torch.optim.SGD)
    assert wrapped.step(lambda: 5) == (optimizer, 5)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_logger_writes_to_the_version_that_is_set(kind, tmp_path):
    kind(tmp_path).log_metrics({"a": 1.0}, step=0)
    logger = kind(tmp_path)
    assert _private.version_is_open(logger)
    _private.set_version(logger, 5)
    assert not _private.version_is_open(logger)
    assert logger.version == 5
    assert not _private.is_opened(logger)
    logger.log_metrics({"a": 1.0}, step=0)
    assert _private.is_opened(logger)
    assert Path(logger.log_dir).name == "version_5"


def test_a_csv_logger_starts_again(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    logger.log_metrics({"a": 1.0}, step=0)
    _private.reopen(logger)
    with pytest.warns(UserWarning, match="exists and is not empty"):
        logger.log_metrics({"a": 2.0}, step=0)
    assert (Path(logger.log_dir) / "metrics.csv").read_text().split() == ["a,step", "2.0,0"]


def test_tensorboard_forgets_from_a_step_on(tmp_path):
    first = TensorBoardLogger(tmp_path, version=0)
    for step in range(5):
        first.log_metrics({"a": 1.0}, step=step)
    first.finalize("success")
    second = TensorBoardLogger(tmp_path, version=0)
    _private.set_purge_step(second, 3)
    second.log_metrics({"a": 2.0}, step=3)
    second.finalize("success")
    events = EventAccumulator(str(second.log_dir)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]


@pytest.mark.usefixtures("process_group")
def test_a_metric_does_not_exchange_its_state_if_told_so(monkeypatch):
    metric = MeanMetric(distributed_available_fn=lambda: True)
    synced = []
    monkeypatch.setattr(metric, "_sync_dist", lambda *a, **k: synced.append(True))
    metric.update(1.0)
    flags = _private.sync_flags(metric)
    assert flags == (True, True)
    _private.set_sync_flags(metric, (False, False))
    assert metric.compute() == 1.0
    metric(2.0)
    assert not synced
    _private.set_sync_flags(metric, flags)
    metric.compute()
    assert synced


def test_the_options_of_a_parser():
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--number", type=int)
    assert {"--help", "--number"} <= set(_private.options_of(parser))


def test_the_action_of_an_option():
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=3)
    assert _private.action_of(parser, "number").default == 3


def test_the_type_of_an_option():
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--number", type=int | None, default=3)
    _private.set_type(_private.action_of(parser, "number"), list[str] | None)
    assert parser.parse_args(["--number", "[a, b]"]).number == ["a", "b"]


def test_a_selection_of_rows_has_indices():
    whole = datasets.Dataset.from_dict({"label": [0, 1, 2]})
    assert not _private.has_indices(whole)
    chosen = whole.select([2, 0])
    assert _private.has_indices(chosen)
    assert len(chosen.data) == 3
    assert not _private.has_indices(chosen.flatten_indices())


@pytest.mark.parametrize("trainer", [Trainer, OtherTrainer])
def test_the_connectors_of_a_trainer(trainer):
    own = vars(trainer(accelerator="cpu", logger=False, enable_checkpointing=False))
    assert {name for name in own if name.endswith("_connector")} == set(_private.TRAINER_CONNECTORS)


@pytest.mark.parametrize("kind", [BoringModel, OtherBoringModel, LightningDataModule])
def test_whether_hyperparameters_are_for_loggers(kind):
    class Saves(kind):
        def __init__(self, logger, rate=1):
            super().__init__()
            self.save_hyperparameters("rate", logger=logger)

    assert not _private.logs_hparams(kind())
    assert not _private.logs_hparams(Saves(logger=False))
    assert _private.logs_hparams(Saves(logger=True))


def test_the_value_of_a_metrics_last_call():
    metric = MeanMetric()
    assert _private.last_batch_value(metric) is None
    metric(torch.tensor(4.0))
    metric(torch.tensor(2.0))
    assert _private.last_batch_value(metric) == 2.0
    metric.update(torch.tensor(1.0))
    metric.reset()
    assert _private.last_batch_value(metric) is None


def test_the_number_of_a_metrics_updates():
    metric = MeanMetric()
    _private.set_update_count(metric, 3)
    assert metric.update_called
    assert metric.update_count == 3
    metric.reset()
    assert metric.update_count == 0
