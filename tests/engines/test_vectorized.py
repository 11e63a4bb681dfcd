"""The vectorized engine against the sequential one."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_feddua import ConfigurationError
from lightning_feddua.data.partition import Partition
from lightning_feddua.models import CharLSTM, LinearRegression, ResNet18, ViT
from lightning_feddua.models.classifier import Classifier as PaperClassifier
from tests.engines.engine_runs import assert_same, fit, plain, separate, shared
from tests.modules import Classifier, classification

SGD, Adam = torch.optim.SGD, torch.optim.Adam
CASES = {
    "sgd": (plain(lambda p: SGD(p, 0.1)), {}),
    "momentum": (plain(lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.01)), {}),
    "nesterov": (plain(lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True)), {}),
    "adam": (plain(lambda p: Adam(p, 0.01)), {}),
    "adamw": (plain(lambda p: torch.optim.AdamW(p, 0.01)), {}),
    "adagrad": (plain(lambda p: torch.optim.Adagrad(p, 0.01)), {}),
    "rmsprop": (plain(lambda p: torch.optim.RMSprop(p, 0.01)), {}),
    "clipping": (plain(lambda p: SGD(p, 0.1)), {"gradient_clip_val": 0.3}),
    "step schedule": (
        plain(
            lambda p: SGD(p, 0.1), lambda o: {"scheduler": torch.optim.lr_scheduler.StepLR(o, 2), "interval": "step"}
        ),
        {},
    ),
    "step schedule, every third step": (
        plain(
            lambda p: SGD(p, 0.1),
            lambda o: {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
                "interval": "step",
                "frequency": 3,
            },
        ),
        # Counted from the start of each epoch, as Trainer does: only epochs of three steps have a third one.
        {"local_steps": 7},
    ),
    "epoch schedule, every other epoch": (
        plain(
            lambda p: SGD(p, 0.1),
            lambda o: {"scheduler": torch.optim.lr_scheduler.ExponentialLR(o, 0.5), "frequency": 2},
        ),
        {"local_steps": 9},
    ),
    "epoch schedule": (plain(lambda p: SGD(p, 0.1), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)), {}),
    "epochs": (plain(lambda p: SGD(p, 0.1)), {"local_epochs": 2, "local_steps": None}),
    "decay": (plain(lambda p: SGD(p, 0.1)), {"local_lr_decay": 0.5}),
    "by samples": (plain(lambda p: SGD(p, 0.1)), {"client_weights": "samples"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("clients", [shared, separate])
def test_same_weights_buffers_and_metrics_in_float64(case, clients, tmp_path):
    make, arguments = CASES[case]
    results = [
        fit(engine, make, clients(), tmp_path, precision="64-true", **arguments)
        for engine in ("sequential", "vectorized")
    ]
    assert results[1][1].backend.engine_name == "vectorized"
    assert_same(*results, tolerance=1e-10)


class Unused(Classifier):
    """A layer that no step uses, under weight decay: it must stay where it is."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.unused = nn.Linear(3, 3)

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1, weight_decay=0.1)


class UnusedBesideLSTM(Unused):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step([self.lstm(x[:, None])[0][:, 0], y], batch_idx)


@pytest.mark.parametrize("make", [Unused, UnusedBesideLSTM])
def test_parameters_without_gradient_are_left_alone(make, tmp_path):
    results = [fit(engine, make, shared(), tmp_path, precision="64-true") for engine in ("sequential", "vectorized")]
    assert results[1][1].backend.engine_name == "vectorized"
    assert_same(*results, tolerance=1e-10)
    torch.manual_seed(0)
    assert torch.equal(results[1][0].unused.weight, make().double().unused.weight)


def images(count, classes):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 3, 32, 32, generator=generator), torch.arange(count) % classes)


class CNNWithoutDropout(PaperClassifier):
    def __init__(self):
        network = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 62),
        )  # fmt: skip
        super().__init__(network, 62, lr=0.01, weight_decay=1e-4)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *itertools.product(["linear", "cnn", "lstm", "vit"], ["32-true", "64-true"]),
        *(pytest.param("resnet", precision, marks=pytest.mark.slow) for precision in ("32-true", "64-true")),
    ],
)
def test_models_of_the_paper_agree(name, precision, tmp_path):
    generator = torch.Generator().manual_seed(0)
    if name == "linear":
        make = lambda: LinearRegression(dim=20, lr=0.1)  # noqa: E731
        data = TensorDataset(torch.randn(24, 20, generator=generator), torch.randn(24, 1, generator=generator))
    elif name == "cnn":
        make, data = CNNWithoutDropout, TensorDataset(torch.rand(24, 1, 28, 28, generator=generator), torch.arange(24))
    elif name == "lstm":
        make = lambda: CharLSTM(hidden=16, dropout=0.0, lr=0.5)  # noqa: E731
        text = torch.randint(79, (24, 12), generator=generator, dtype=torch.uint8)
        data = TensorDataset(text, torch.arange(24))
    elif name == "resnet":
        make, data = (lambda: ResNet18(10, lr=1e-4)), images(6, 10)
    else:
        make, data = (lambda: ViT(100, hidden=48, layers=2, heads=4)), images(12, 100)
    size = len(data) // 3
    clients = Partition(data, ["a", "b", "c"], np.arange(3 * size), np.full(3, size))
    rounds = 2 if name == "resnet" else 5
    results = [
        fit(
            engine,
            make,
            clients,
            tmp_path,
            rounds=rounds,
            batch_size=4,
            local_steps=2,
            precision=precision,
            validate_every=0,
        )  # fmt: skip
        for engine in ("sequential", "vectorized")
    ]
    assert results[1][1].backend.engine_name == "vectorized"
    assert_same(*results, tolerance=1e-10 if precision == "64-true" else 1e-5)


def test_dropout_differs_between_clients_and_agrees_on_average(tmp_path):
    losses = {
        engine: np.array([
            fit(engine, Classifier, shared(), tmp_path, rounds=3, seed=s)[1].history[-1]["val_loss"]
            for s in range(12)
        ])
        for engine in ("sequential", "vectorized")
    }  # fmt: skip
    difference = losses["sequential"].mean() - losses["vectorized"].mean()
    error = np.sqrt(sum(l.var(ddof=1) / len(l) for l in losses.values()))  # noqa: E741
    assert abs(difference) < 4 * error


def test_epoch_counter_of_unequal_clients_is_not_guessed(tmp_path):
    class Counts(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1 + self.current_epoch)

    with pytest.raises(ConfigurationError, match=r"`self.current_epoch` differs between the clients"):
        fit("vectorized", Counts, {"a": classification(30), "b": classification(60)}, tmp_path)
    fit("vectorized", Counts, {"a": classification(40), "b": classification(40)}, tmp_path)


@pytest.mark.parametrize("length", ["num_training_batches", "max_epochs"])
def test_length_of_an_epoch_of_unequal_clients_is_not_guessed(length, tmp_path):
    class Asks(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) / getattr(self.trainer, length)

    with pytest.raises(ConfigurationError, match=r"asks for the length of an epoch, which differs between clients"):
        fit("vectorized", Asks, {"a": classification(30), "b": classification(60)}, tmp_path)
    fit("vectorized", Asks, {"a": classification(40), "b": classification(40)}, tmp_path)


def test_batches_changed_in_place_are_stacked_anew(tmp_path):
    class Changes(Classifier):
        def __init__(self):
            super().__init__(dropout=0.0)

        def training_step(self, batch, batch_idx):
            batch[0].mul_(2.0)
            return super().training_step(batch, batch_idx)

    clients = separate((10, 10))
    results = [fit(engine, Changes, clients, tmp_path, precision="64-true") for engine in ("sequential", "vectorized")]
    assert_same(*results, tolerance=1e-10)


def test_chunks_by_memory_give_the_same(tmp_path, monkeypatch):
    make = plain(lambda p: Adam(p, 0.01))
    whole = fit("vectorized", make, separate(), tmp_path, precision="64-true")
    monkeypatch.setattr("lightning_feddua.engines.vectorized.MEMORY_BOUND", 2 * 4 * 75 * 8)
    chunked = fit("vectorized", make, separate(), tmp_path, precision="64-true")
    assert_same(whole, chunked, tolerance=1e-12)


@pytest.mark.parametrize("devices", [2, 3])
def test_ranks_agree(devices, tmp_path):
    make = plain(lambda p: Adam(p, 0.01))
    one = fit("vectorized", make, separate(), tmp_path, precision="64-true")
    many = fit("vectorized", make, separate(), tmp_path, precision="64-true", devices=devices, strategy="ddp_fork")
    assert_same(one, many, tolerance=1e-12)
