"""Every public name of Trainer: there, or refused in one clear sentence."""

from importlib import import_module

import pytest
import torch
from lightning import LightningModule
from torch import nn

from lightning_feddua import ConfigurationError, FedAvg, FederatedDataModule, FederatedLoop
from lightning_feddua.host.trainer.refusals import REFUSED
from tests.modules import Classifier, classification
from tests.trainers import quiet_trainer


def public_names(package):
    """Those of the class, and those that an object has besides."""
    trainer = import_module(package).Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    return {name for name in dir(trainer) if not name.startswith("_")}


def fit(module, tmp_path, **arguments):
    defaults = {"max_rounds": 1, "local_epochs": 1, "accelerator": "cpu", "engine": "sequential", "server": FedAvg()}
    loop = FederatedLoop(**{**defaults, **arguments}, out_dir=tmp_path, enable_progress_bar=False)
    data = FederatedDataModule({"a": classification(20)}, classification(10), batch_size=10)
    loop.fit(module, data)
    return loop


def module_that(package, ask):
    """A module of a package that calls a function in every hook."""

    class Asks(import_module(package).LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def setup(self, stage):
            ask(self)

        def training_step(self, batch, batch_idx):
            ask(self)
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            ask(self)

        def configure_optimizers(self):
            ask(self)
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_fit_end(self):
            ask(self)

        test_step = validation_step

    return Asks()


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_every_public_name_is_there_or_refused(tmp_path, package):
    found, refused, names = {}, {}, sorted(public_names(package))

    def ask(module):
        for name in names:
            try:
                found[name] = getattr(module.trainer, name)
            except ConfigurationError as error:
                refused[name] = str(error)
        states = import_module(f"{package}.trainer.states")
        assert type(found["state"]) is states.TrainerState
        assert found["state"].status is states.TrainerStatus.RUNNING

    loop = fit(module_that(package, ask), tmp_path)
    # A name that a new version of Trainer adds has to be added to the view, or to what it refuses.
    assert set(refused) == set(REFUSED)
    assert len(found) > 70
    for name, message in refused.items():
        assert message.startswith(f"`self.trainer.{name}` is not available in a federated run. ")
        assert message.count(". ") == 1
        assert "`Asks`" in message
    for run, stage in (("validate", "VALIDATING"), ("test", "TESTING")):
        data = FederatedDataModule({"a": classification(20)}, classification(10), classification(10))
        getattr(loop, run)(module_that(package, ask), data)
        assert found["state"].stage.name == found["state"].fn.name == stage
        assert found["evaluating"]
        assert not found["training"]
    assert set(refused) == set(REFUSED)


class Guarded(Classifier):
    """Asks in properties, where torch hides an AttributeError behind one about the property."""

    @property
    def loops(self):
        return self.trainer.fit_loop

    @property
    def own(self):
        return hasattr(self.trainer, "my_own_flag") or hasattr(self.trainer, "_my_own_flag")


def test_the_sentence_is_not_swallowed_in_a_property(tmp_path):
    class Asks(Guarded):
        def training_step(self, batch, batch_idx):
            assert not self.own
            return self.loops

    with pytest.raises(
        ConfigurationError, match=r"`self.trainer.fit_loop` is not available .*\. Read .* `Asks` instead"
    ):
        fit(Asks(), tmp_path)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m: m.trainer.fit(m), r"`self.trainer.fit` is not .*\. Call it on the `FederatedLoop`"),
        (lambda m: m.trainer._data_connector, r"`self.trainer._data_connector` is not available .*\. Remove"),
        (lambda m: m.trainer.strategy.setup, r"`self.trainer.strategy.setup` is not available .*\. Remove"),
        (lambda m: m.trainer.precision_plugin.connect, r"`self.trainer.precision_plugin.connect` is not available"),
    ],
)
def test_what_only_a_trainer_can_do(tmp_path, ask, message):
    module = Classifier()
    module.training_step = lambda batch, batch_idx: ask(module)
    # Not a mistake of this client: others would fail too, and nobody is left out.
    with pytest.raises(ConfigurationError, match=message):
        fit(module, tmp_path, on_client_error="skip")


@pytest.mark.parametrize("owner", ["trainer", "trainer.strategy", "trainer.precision_plugin"])
def test_names_that_trainer_has_not_can_be_guarded(tmp_path, owner):
    class Asks(Classifier):
        def training_step(self, batch, batch_idx):
            thing = self.trainer if owner == "trainer" else getattr(self.trainer, owner.partition(".")[2])
            assert not hasattr(thing, "my_own_flag")
            assert getattr(thing, "my_own_flag", 3) == 3
            return super().training_step(batch, batch_idx)

    fit(Asks(), tmp_path)


def test_what_modules_do_with_their_trainer(tmp_path):
    saved = []

    class Works(Classifier):
        def training_step(self, batch, batch_idx):
            trainer, device = self.trainer, torch.device("cpu")
            with trainer.profiler.profile("step"), trainer.init_module(), trainer.precision_plugin.train_step_context():
                assert nn.Linear(2, 2).weight.device == device
            assert trainer.strategy.root_device == device
            trainer.strategy.barrier()
            assert trainer.strategy.broadcast("x") == "x"
            assert trainer.strategy.reduce_boolean_decision(True)
            assert trainer.strategy.batch_to_device(batch)[0].equal(batch[0])
            assert trainer.precision_plugin.precision == trainer.precision == "32-true"
            assert self.all_gather(batch[0]) is not None
            trainer.save_checkpoint(tmp_path / "sub" / f"{self.global_step}.ckpt")
            saved[:] = [p.detach().clone() for p in self.parameters()]
            return super().training_step(batch, batch_idx)

    module = Works(lr=0.02)
    fit(module, tmp_path)
    loaded = Works.load_from_checkpoint(tmp_path / "sub" / "1.ckpt")
    assert loaded.hparams.lr == 0.02
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), saved, strict=True))


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("training_epoch_end", "fit"),
        ("validation_epoch_end", "fit"),
        ("validation_epoch_end", "validate"),
        ("test_epoch_end", "test"),
    ],
)
def test_hooks_that_lightning_removed_are_refused_where_trainer_refuses_them(tmp_path, name, run):
    class Old(Classifier):
        def test_step(self, batch, batch_idx):
            return self.validation_step(batch, batch_idx)

    setattr(Old, name, lambda self, outputs: None)
    data = FederatedDataModule({"a": classification(20)}, classification(10), classification(10))
    trainer = quiet_trainer()
    with pytest.raises(NotImplementedError, match=name):
        getattr(trainer, run)(Old(), datamodule=data)
    loop = FederatedLoop(local_steps=1, accelerator="cpu", out_dir=tmp_path, enable_progress_bar=False)
    with pytest.raises(ConfigurationError, match=rf"`Old` implements `{name}`, which Lightning 2.0 removed\. Use `on_"):
        getattr(loop, run)(Old(), data)


@pytest.mark.parametrize("name", ["training_step_end", "on_epoch_start", "on_epoch_end", "validation_step_end"])
def test_what_trainer_no_longer_calls_is_not_called(tmp_path, name):
    def never(self, *args):
        raise AssertionError

    module: LightningModule = type("Old", (Classifier,), {name: never})()
    fit(module, tmp_path)
