import pytest
import torch
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lightning_feddua import ClientError, ConfigurationError, FedAvg, FederatedDataModule, FederatedLoop
from tests.modules import Classifier, classification


@pytest.fixture
def fit(tmp_path):
    def fit(module, **arguments):
        defaults = {"max_rounds": 2, "local_epochs": 2, "out_dir": tmp_path, "accelerator": "cpu"}
        loop = FederatedLoop(**{**defaults, **arguments}, enable_progress_bar=False)
        clients = {"a": classification(20), "b": classification(30)}
        loop.fit(module, FederatedDataModule(clients, classification(10), batch_size=10))
        return loop

    return fit


def test_counters_and_places_that_modules_ask_for(fit, tmp_path, capsys):
    seen = []

    class Curious(Classifier):
        def training_step(self, batch, batch_idx):
            t = self.trainer
            seen.append((t.current_round, self.current_epoch, self.global_step, t.max_steps, t.num_training_batches))
            assert (t.max_epochs, t.estimated_stepping_batches, t.max_rounds) == (2, t.max_steps, 2)
            assert t.training
            assert not t.validating
            assert (t.world_size, self.global_rank, t.num_nodes, t.num_devices) == (1, 0, 1, 1)
            assert t.is_global_zero
            assert t.datamodule.batch_size == 10
            assert t.model is self
            assert t.log_dir.startswith(str(tmp_path))
            assert isinstance(self.logger, CSVLogger)
            assert len(self.loggers) == 1
            assert t.optimizers[0].param_groups[0]["lr"] == 0.01
            self.print("hello")
            return super().training_step(batch, batch_idx)

        def on_validation_epoch_end(self):
            assert self.trainer.validating != self.trainer.sanity_checking

    fit(Curious(), loggers=CSVLogger(tmp_path), engine="sequential")
    assert seen[:4] == [(0, 0, 0, 4, 2), (0, 0, 1, 4, 2), (0, 1, 2, 4, 2), (0, 1, 3, 4, 2)]
    assert seen[4] == (0, 0, 0, 6, 3)
    assert len(seen) == 2 * (4 + 6)
    assert capsys.readouterr().out.count("hello") == 20


def test_logging_reduces_as_asked(fit):
    class Logs(Classifier):
        def training_step(self, batch, batch_idx):
            self.log("mean", float(batch_idx), batch_size=batch_idx + 1)
            self.log("sum", torch.tensor(1), reduce_fx="sum")
            self.log("max", batch_idx, reduce_fx=torch.max)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            self.log("epoch", float(self.current_epoch))

    row = fit(Logs(), max_rounds=1, local_epochs=1).history[0]
    # Client a has 2 batches, client b has 3: (0·1 + 1·2)/3 and (0·1 + 1·2 + 2·3)/6.
    assert row["mean"] == pytest.approx((2 / 3 + 8 / 6) / 2)
    assert row["sum"] == 2.5
    assert row["max"] == 1.5
    assert row["epoch"] == 0


def updated(metric):
    metric.update(torch.tensor([0]), torch.tensor([0]))
    return metric


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (lambda m: m.log("x", torch.ones(2)), r"shape \(2,\)\. Log a single number"),
        (lambda m: m.log("x", 1.0, reduce_fx=torch.prod), r"reduce_fx=.*not supported"),
        (lambda m: m.log("x", "high"), r"was called with a `str`\. Log a number"),
        (
            lambda m: m.log("x", MetricCollection([MulticlassAccuracy(3)])),
            r"with a `MetricCollection`\. Log .* with `self.log_dict`\.",
        ),
        (
            lambda m: m.log("x", updated(MulticlassConfusionMatrix(3))),
            r"logged as `x` computes no single number\. Call",
        ),
    ],
)
def test_logging_what_cannot_be_logged(fit, log, message):
    class Logs(Classifier):
        def training_step(self, batch, batch_idx):
            log(self)

    with pytest.raises(ClientError, match=message):
        fit(Logs())


def test_logging_where_nothing_is_logged(fit):
    class Logs(Classifier):
        def on_fit_start(self):
            self.log("x", 1.0)

    with pytest.raises(RuntimeError, match=r"`self.log` was called where there is nothing to log to .*\. Call it in"):
        fit(Logs())


@pytest.mark.parametrize("name", ["round", "eta_g", "clients", "heterogeneity", "seconds"])
def test_names_of_the_loop_are_not_overwritten(fit, name):
    class Logs(Classifier):
        def training_step(self, batch, batch_idx):
            self.log(name, 7.0)

    with pytest.raises(ClientError, match=rf"`self.log\('{name}', ...\)` takes a name that the loop .*\. Choose"):
        fit(Logs())


@pytest.mark.parametrize("name", ["validation_step", "on_validation_batch_end"])
def test_several_datasets_for_validation_are_refused(fit, name):
    def needs_dataloader_idx(self, batch, batch_idx, dataloader_idx):
        return None

    with pytest.raises(ConfigurationError, match=rf"`Several.{name}` needs a `dataloader_idx`, and .*\. Write"):
        fit(type("Several", (Classifier,), {name: needs_dataloader_idx})())


def module_with(optimizers, **attributes):
    class Configured(Classifier):
        def configure_optimizers(self):
            return optimizers(torch.optim.SGD(self.parameters(), lr=0.1))

    module = Configured()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


StepLR = torch.optim.lr_scheduler.StepLR


@pytest.mark.parametrize(
    "shape",
    [
        lambda o: o,
        lambda o: [o],
        lambda o: (o,),
        lambda o: ([o], []),
        lambda o: ([o], [StepLR(o, 1)]),
        lambda o: ([o], [{"scheduler": StepLR(o, 1), "interval": "step"}]),
        lambda o: {"optimizer": o},
        lambda o: {"optimizer": o, "lr_scheduler": StepLR(o, 1)},
        lambda o: [{"optimizer": o, "lr_scheduler": {"scheduler": StepLR(o, 1)}}],
    ],
)
def test_every_shape_of_configure_optimizers(fit, shape):
    module = module_with(shape)
    start = module.net[0].weight.clone()
    fit(module)
    assert not torch.equal(module.net[0].weight, start)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (module_with(lambda o: None), r"`Configured.configure_optimizers` returned `None`\. Return"),
        (module_with(lambda o: [o, o]), r"returned 2 optimizers\. Return one, or set"),
        (
            module_with(lambda o: ([o], [torch.optim.lr_scheduler.ReduceLROnPlateau(o)])),
            r"returned a `ReduceLROnPlateau` without a `monitor`\. Return",
        ),
    ],
)
def test_what_is_refused(fit, module, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(module)


def test_dataloader_iter_is_refused(fit):
    class Iterates(Classifier):
        def training_step(self, dataloader_iter):
            return None

    with pytest.raises(ConfigurationError, match=r"takes a `dataloader_iter`, and a federated client has none\. Write"):
        fit(Iterates())


def test_hooks_fire_at_the_local_points(fit):
    events = []

    def record(name):
        def hook(self, *args):
            events.append(name)

        return hook

    names = [
        "setup",
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_train_epoch_end",
        "on_train_end",
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_epoch_end",
        "on_validation_end",
        "on_fit_end",
        "teardown",
    ]
    hooked = type("Hooked", (Classifier,), {name: record(name) for name in names})
    arguments = {"max_rounds": 1, "local_epochs": None, "local_steps": 1, "server": FedAvg(), "clients_per_round": 1}
    fit(hooked(), **arguments, num_sanity_val_steps=0)
    assert events == names


def test_configure_model_makes_the_layers(fit):
    class Late(Classifier):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            if self.net is None:
                self.net = nn.Linear(4, 3)

    module = Late()
    loop = fit(module)
    assert loop.weights.numel() == 15
    assert torch.equal(module.net.weight.detach().reshape(-1), loop.weights[:12])


class LoRALinear(nn.Module):
    """A frozen layer and a low-rank correction."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_only_adapters_train_and_the_base_never_enters_the_vector(fit):
    class Adapted(Classifier):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(LoRALinear(nn.Linear(4, 100)), nn.ReLU(), LoRALinear(nn.Linear(100, 3)))

    module = Adapted()
    base = [module.net[i].base.weight.clone() for i in (0, 2)]
    storages = [module.net[i].base.weight.data_ptr() for i in (0, 2)]
    loop = fit(module, max_rounds=5)
    assert loop.weights.numel() == 2 * (4 + 100) + 2 * (100 + 3)
    for i, weight, storage in zip((0, 2), base, storages, strict=True):
        assert torch.equal(module.net[i].base.weight, weight)
        assert module.net[i].base.weight.data_ptr() == storage
        assert module.net[i].up.weight.abs().sum() > 0
