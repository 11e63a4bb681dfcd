"""Loggers as a module sees them, of either package, and the quiet one where the run has none."""

import copy
import csv
import time
from importlib import import_module

import pytest
import torch
import yaml
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.loggers.logger import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_feddua import ConfigurationError, FedAvg, FederatedCallback, FederatedDataModule, FederatedLoop
from lightning_feddua.checkpoints.files import FEDERATED
from lightning_feddua.host.trainer.quiet_logger import QuietLogger
from tests.modules import Classifier, classification

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


class Data(FederatedDataModule):
    def __init__(self, **hyperparameters):
        super().__init__({"a": classification(20), "b": classification(30)}, classification(10), batch_size=10)


def fit(module, tmp_path, data=None, ckpt_path=None, **arguments):
    defaults = {"max_rounds": 2, "local_steps": 2, "accelerator": "cpu", "server": FedAvg(), "engine": "sequential"}
    loop = FederatedLoop(**{**defaults, **arguments}, out_dir=tmp_path, enable_progress_bar=False)
    loop.fit(module, data or Data(), ckpt_path)
    return loop


def test_a_module_finds_a_quiet_logger_by_default(tmp_path):
    places, names = set(), set()

    class Draws(Classifier):
        def training_step(self, batch, batch_idx):
            logger = self.logger
            assert self.loggers == [logger] == self.trainer.loggers
            logger.log_metrics({"x": 1.0}, step=0)
            logger.log_hyperparams({"y": 2}, {"metric": 0})
            logger.log_image("pictures", [batch[0]])
            logger.experiment.add_image("picture", batch[0], self.global_step)
            logger.experiment.log({"x": 1})
            logger.experiment.config.update({"x": 1})
            logger.experiment["some/field"].append(1)
            logger.experiment["some/field"] = 1
            with logger.experiment.train():
                assert list(logger.experiment.runs) == []
            places.update((logger.log_dir, logger.save_dir, logger.root_dir, self.trainer.log_dir))
            names.add(f"{logger.name}/version_{logger.version}")
            return super().training_step(batch, batch_idx)

    module = Draws()
    loop = fit(module, tmp_path, checkpoint_every=1)
    assert places == {str(loop.run_dir)}
    assert names == {"lightning_logs/version_0"}
    assert loop.fabric.loggers == []
    saved = torch.load(max(loop.run_dir.glob("*.ckpt")), weights_only=True)
    assert saved[FEDERATED]["loggers"] == []


def test_a_quiet_logger_can_be_copied():
    logger = copy.deepcopy(QuietLogger("here"))
    assert logger.log_dir == "here"
    logger.experiment.anything(1).at_all[2]()
    assert isinstance(logger, Logger)


class Remembers(Logger):
    name = version = "memory"

    def __init__(self):
        self.hyperparameters, self.metrics, self.status = None, [], None

    def log_hyperparams(self, params):
        self.hyperparameters = dict(params)

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))

    def finalize(self, status):
        self.status = status


def test_hyperparameters_and_rounds_reach_the_logger(tmp_path):
    logger = Remembers()
    fit(Classifier(lr=0.05), tmp_path, loggers=[logger])
    assert logger.hyperparameters == {"dropout": 0.5, "lr": 0.05}
    assert [step for step, _ in logger.metrics] == [0, 1]
    assert "val_acc" in logger.metrics[0][1]
    assert logger.status == "success"


class Private(Classifier):
    def __init__(self, secret=7):
        super().__init__()
        self.save_hyperparameters(logger=False)


class DataWithHyperparameters(Data):
    def __init__(self, lr=0.01, size=3):
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_that_are_not_for_loggers(tmp_path):
    logger = Remembers()
    loop = fit(Private(), tmp_path, loggers=[logger], checkpoint_every=1)
    assert logger.hyperparameters is None
    assert Private.load_from_checkpoint(max(loop.run_dir.glob("*.ckpt"))).hparams.secret == 7
    # Those of the data are apart.
    fit(Private(), tmp_path, DataWithHyperparameters(), loggers=[logger])
    assert logger.hyperparameters == {"lr": 0.01, "size": 3}


def test_hyperparameters_of_the_data_are_logged_too(tmp_path):
    logger = Remembers()
    module = Classifier()
    # What is logged is what the module was made with, as under Trainer.
    module.hparams.dropout = 0.1
    fit(module, tmp_path, DataWithHyperparameters(), loggers=[logger])
    assert logger.hyperparameters == {"dropout": 0.5, "lr": 0.01, "size": 3}
    with pytest.raises(ConfigurationError, match=r"both save a hyperparameter `lr`, with different values\. Rename"):
        fit(Classifier(), tmp_path, DataWithHyperparameters(lr=0.5), loggers=[logger])


def test_the_folder_of_the_first_logger(tmp_path):
    places = []

    class Asks(Classifier):
        def on_train_start(self):
            places.append(self.trainer.log_dir)

    fit(Asks(), tmp_path, loggers=CSVLogger(tmp_path / "csv"))
    assert set(places) == {str(tmp_path / "csv" / "lightning_logs" / "version_0")}
    places.clear()
    fit(Asks(), tmp_path, loggers=Remembers())
    assert len(set(places)) == 1
    assert places[0].startswith(str(tmp_path / "version_"))


class Crash(FederatedCallback):
    def on_round_end(self, loop, round):
        if round == 2:
            raise RuntimeError("power cut")


def rows(path):
    with path.open() as file:
        return [row["step"] for row in csv.DictReader(file)]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("kind", ["CSVLogger", "TensorBoardLogger"])
def test_loggers_of_either_package_are_resumed(tmp_path, package, kind):
    def logger():
        return getattr(import_module(f"{package}.loggers"), kind)(tmp_path / "logs")

    arguments = {"checkpoint_every": 2, "max_rounds": 4}
    with pytest.raises(RuntimeError, match="power cut"):
        fit(Classifier(), tmp_path, loggers=logger(), callbacks=[Crash()], **arguments)
    if kind == "TensorBoardLogger":
        # Files of one second are read in the order of their numbers as text, in which 10 comes before 9.
        time.sleep(1.0)
    # The third round was logged and not saved. It is run again, and is there once.
    fit(Classifier(), tmp_path, loggers=logger(), ckpt_path="last", **arguments)
    (folder,) = (tmp_path / "logs" / "lightning_logs").iterdir()
    if kind == "CSVLogger":
        assert rows(folder / "metrics.csv") == ["0", "1", "2", "3"]
    else:
        logged = EventAccumulator(str(folder)).Reload().Scalars("val_loss")
        assert [event.step for event in logged] == [0, 1, 2, 3]
    assert yaml.safe_load((folder / "hparams.yaml").read_text()) == {"dropout": 0.5, "lr": 0.01}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_writes_to_the_experiment_of_its_logger(tmp_path, package):
    class Draws(Classifier):
        def on_validation_epoch_end(self):
            self.logger.experiment.add_scalar("own", 3.0, self.trainer.current_round)

    logger = import_module(f"{package}.loggers").TensorBoardLogger(tmp_path / "logs")
    fit(Draws(), tmp_path, loggers=logger, num_sanity_val_steps=0)
    logged = EventAccumulator(logger.log_dir).Reload().Scalars("own")
    assert [(event.step, event.value) for event in logged] == [(0, 3.0), (1, 3.0)]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_graph_of_a_module_is_logged_if_asked_for(tmp_path, package):
    class Example(import_module(package).LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)
            self.example_input_array = torch.zeros(2, 4)

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logger = import_module(f"{package}.loggers").TensorBoardLogger(tmp_path / "logs", log_graph=True)
    fit(Example(), tmp_path, loggers=logger)
    assert EventAccumulator(logger.log_dir).Reload().Tags()["graph"]
