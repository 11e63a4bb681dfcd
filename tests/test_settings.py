"""Bad settings, models and data are found before any work starts, in one sentence."""

import pytest
from lightning import LightningModule
from lightning.fabric.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy as TrainersDDP
from torch import nn

from lightning_feddua import ConfigurationError, FedAvg
from tests.modules import Classifier, classification


class NoOptimizer(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def training_step(self, batch):
        return self.layer(batch[0]).sum()


class Frozen(Classifier):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"local_steps": None}, r"^Neither `local_steps` nor `local_epochs` is given\. Give exactly one of the two\.$"),
        ({"local_steps": 1, "local_epochs": 1}, r"^Both `local_steps=1` and `local_epochs=1` are given\. Give exactly"),
        ({"max_epochs": 3}, r"^`FederatedLoop` has no argument `max_epochs`\. Use `max_rounds`\.$"),
        ({"logger": False}, r"no argument `logger`\. Use `loggers`\."),
        ({"default_root_dir": "x"}, r"no argument `default_root_dir`\. Use `out_dir`\."),
        (
            {"clients_per_rounds": 2},
            r"no argument `clients_per_rounds`\. Write `clients_per_round` if that was meant\.$",
        ),
        ({"qqq": 2}, r"no argument `qqq`\. Choose among `accelerator`, `accumulate_grad_batches`"),
        ({"loggers": False}, r"^The logger is `False`\. Give a logger of Fabric's or Lightning's"),
        ({"loggers": [True]}, r"^The logger is `True`\. "),
        ({"loggers": "csv"}, r"^The logger is `'csv'`\. "),
        ({"loggers": CSVLogger}, r"^The logger is `<class .*CSVLogger'>`\. "),
        (
            {"strategy": TrainersDDP()},
            r"take the strategy `lightning\.pytorch.*DDPStrategy`\. Give Fabric's, from `lightning\.fabric\.strat",
        ),
        ({"accelerator": CSVLogger}, r"Give Fabric's, from `lightning.fabric.accelerators`\."),
        ({"local_steps": 0}, r"`local_steps=0` is less than 1\. Give"),
        ({"max_rounds": -1}, r"`max_rounds=-1`"),
        ({"clients_per_round": 0}, r"`clients_per_round=0` is less than 1\. Choose"),
        ({"clients_per_round": 0.0}, r"`clients_per_round=0.0` is not a fraction"),
        ({"clients_per_round": 1.5}, r"`clients_per_round=1.5` is not a fraction"),
        ({"clients_per_round": 5}, r"`clients_per_round=5` is more than the 4 clients there are\. Choose"),
        ({"engine": "fast"}, r"no engine `fast`\. Choose one of `auto`, `compiled`, `sequential`"),
        ({"client_weights": "size"}, r"no client_weights `size`\."),
        ({"strategy": "fsdp", "devices": 2}, r"Fabric cannot start with .*strategy='fsdp'.*\. Change"),
        ({"strategy": "ddp_spawn", "devices": 2}, r"starts processes that cannot see the model\. Use `ddp`"),
        ({"precision": "fp8"}, r"Fabric cannot start with .*precision='fp8'"),
        ({"devices": 0}, r"Fabric cannot start with .*devices=0"),
        ({"seed": -1}, r"`seed=-1` is less than 0"),
        ({"local_lr_decay": -1.0}, r"`local_lr_decay=-1.0` is not positive"),
        ({"gradient_clip_val": 0.0}, r"`gradient_clip_val=0.0` is not positive"),
        ({"server": "FedAvg"}, r"The server is `'FedAvg'`\. Give an instance of `Server`"),
        ({"server": FedAvg}, r"The server is .*FedAvg.*\. Give an instance"),
    ],
)
def test_bad_settings(make_loop, clients, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        make_loop(**arguments).fit(Classifier(), clients)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (Classifier, {}, r"no clients\. Give"),
        (Classifier, {"a": classification(5), "b": classification(0)}, r"dataset of client `b` is empty\. Leave"),
        (
            lambda: nn.Linear(1, 1),
            {"a": classification(5)},
            r"The model is `Linear.*Give an instance of `LightningModule`",
        ),
        (Classifier, {"a": None}, r"client `a` is a `NoneType`, which cannot be indexed"),
        (Classifier, classification(5), r"a `TensorDataset`, which has no clients\. Give"),
        (Frozen, {"a": classification(5)}, r"`Frozen` has no trainable parameters\. Give"),
        (NoOptimizer, {"a": classification(5)}, r"`NoOptimizer` does not define `configure_optimizers`\. Return"),
    ],
)
def test_bad_models_and_data_are_found_before_training(make_loop, tmp_path, model, data, message):
    with pytest.raises(ConfigurationError, match=message):
        make_loop().fit(model(), data)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder(make_loop, clients, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot be written: Not a directory\. Give a writable"):
        make_loop(out_dir=tmp_path / "file" / "runs").fit(Classifier(), clients)
