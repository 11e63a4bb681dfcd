"""Which engine a run gets, and that finding out leaves nothing behind."""

import random
import re

import numpy as np
import pytest
import torch
from torch.multiprocessing import ProcessRaisedException
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_feddua import ConfigurationError, FederatedCallback, FederatedLoop, LocalTraining
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.engines.trial import known_engine
from lightning_feddua.models import LinearRegression
from tests.engines.engine_runs import fit, plain, shared
from tests.modules import Classifier, classification


class Items(Classifier):
    def __init__(self):
        super().__init__(dropout=0.0)

    def training_step(self, batch, batch_idx):
        if batch[0].sum().item() > 1e9:
            return None
        return super().training_step(batch, batch_idx)


class TorchMetric(Classifier):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("acc", self.accuracy)
        return super().training_step(batch, batch_idx)


class KeepsLosses(Classifier):
    """Tensors in a list on the module: of no use after a vmapped step."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        self.last = loss.detach()
        return loss


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Hooked(Classifier):
    def on_after_backward(self):
        pass


class OtherOptimizer(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Items, "item"),
        (TorchMetric, ""),
        (KeepsLosses, "its training step changes `self.la?o?st?"),
        (Manual, "it optimizes manually"),
        (Hooked, "it overrides `on_after_backward`"),
        (OtherOptimizer, "its optimizer `LBFGS` is not known to work element by element"),
    ],
)
def test_what_cannot_be_vectorized_is_said_once_and_before_training(make, reason, tmp_path):
    with pytest.raises(ConfigurationError, match=rf"cannot be vectorized: .*{reason}.*\. Use `engine=\"auto\"`"):
        fit("vectorized", make, shared(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    if make is KeepsLosses:
        model, _ = fit("auto", make, shared(), tmp_path, rounds=1)
        # Neither the trial nor a client leaves anything behind.
        assert model.losses == []
        assert not hasattr(model, "last")
    if make is not Manual:
        _, loop = fit("auto", make, shared(), tmp_path, rounds=1)
        assert loop.engine_note.startswith("sequential (not vectorized: ")
        assert re.search(reason, loop.engine_note)
        sequential, _ = fit("sequential", make, shared(), tmp_path, rounds=1)
        auto, _ = fit("auto", make, shared(), tmp_path, rounds=1)
        assert all(torch.equal(a, b) for a, b in zip(sequential.parameters(), auto.parameters(), strict=True))


def test_auto_measures_and_says_so(tmp_path):
    clients = {str(i): classification(20, seed=i) for i in range(20)}
    _, loop = fit("auto", plain(lambda p: torch.optim.SGD(p, 0.1)), clients, tmp_path, rounds=1)
    assert "times" in loop.engine_note


class KeepsCount(Classifier):
    """A tensor on the module that is changed in place, and a metric that is never logged."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.steps = torch.zeros(())
        self.mean = MeanMetric()
        self.batches = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.batches += 1
        self.mean(batch[0].shape[0])
        return super().training_step(batch, batch_idx)


class AtStart(FederatedCallback):
    """Notes what the first hook of a run finds."""

    def on_fit_start(self, loop):
        federation = loop._federation
        optimizer = federation.optimizers.optimizers[0]
        self.state = {name: value.clone() for name, value in loop.module.state_dict().items()}
        self.gradients = [p.grad for p in loop.module.parameters()]
        self.optimizer_state = dict(optimizer.state)
        self.parameters = [id(p) for group in optimizer.param_groups for p in group["params"]]
        self.own_parameters = [id(p) for p in loop.module.parameters()]
        self.view = (federation.view.global_step, federation.view.current_epoch, federation.view.in_client)
        self.drawn = (random.random(), np.random.rand(), torch.rand(()).item())
        self.attributes = {n: getattr(loop.module, n) for n in ("steps", "batches") if hasattr(loop.module, n)}
        self.attributes = {name: float(value) for name, value in self.attributes.items()}


@pytest.mark.parametrize(
    ("make", "engine"),
    [
        (lambda: Classifier(dropout=0.0), "auto"),
        (lambda: Classifier(dropout=0.0), "vectorized"),
        (Classifier, "auto"),
        (Classifier, "vectorized"),
        (KeepsCount, "auto"),
    ],
)
def test_a_trial_leaves_nothing_behind(make, engine, tmp_path):
    found = {}
    for name in ("sequential", engine):
        random.seed(1)
        np.random.seed(1)
        found[name] = AtStart()
        fit(name, make, shared(), tmp_path, rounds=1, callbacks=found[name])
    expected, trial = found["sequential"], found[engine]
    torch.manual_seed(0)
    for name, value in make().state_dict().items():
        assert torch.equal(trial.state[name], value), name
    assert trial.gradients == [None] * len(trial.gradients)
    assert trial.optimizer_state == {}
    assert trial.parameters == trial.own_parameters
    assert trial.view == (0, 0, False)
    assert trial.drawn == expected.drawn
    assert trial.attributes == expected.attributes
    if make is KeepsCount:
        assert trial.attributes == {"steps": 0.0, "batches": 0.0}


def test_a_metric_starts_anew_after_a_trial(tmp_path):
    runs = {name: fit(name, KeepsCount, shared(), tmp_path, rounds=1)[0] for name in ("sequential", "auto")}
    counts = {name: (model.steps.item(), model.batches, model.mean.weight.item()) for name, model in runs.items()}
    assert counts["auto"] == counts["sequential"]
    # Each client's are its own.
    assert counts["auto"][:2] == (0, 0)


class Returns(LocalTraining):
    def project(self, weights, local):
        return weights * 0.5


def test_a_mistake_in_the_algorithm_is_not_taken_for_an_obstacle_of_vectorization(tmp_path):
    with pytest.raises(ConfigurationError, match="`Returns.project` returned"):
        fit("auto", lambda: Classifier(dropout=0.0), shared(), tmp_path, client=Returns())
    # Rank 0, which makes the trial, tells the other.
    with pytest.raises(ProcessRaisedException, match="ConfigurationError: `Returns.project` returned"):
        fit("auto", Classifier, shared(), tmp_path, client=Returns(), devices=2, strategy="ddp_fork")


class CountsRounds(LocalTraining):
    def set_up(self, weights, population, local_steps):
        self.numbers = {"rounds": 0}

    def begin_round(self, lr, mean_gradient):
        self.numbers["rounds"] += 1


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "auto"])
def test_a_trial_is_no_round_of_the_algorithm(tmp_path, engine):
    client = CountsRounds()
    settings = {"max_rounds": 2, "local_steps": 1, "precision": "64-true", "enable_progress_bar": False}
    loop = FederatedLoop(client=client, engine=engine, out_dir=tmp_path, **settings)
    loop.fit(LinearRegression(dim=3), SyntheticRegression(dim=3, num_clients=4))
    assert client.numbers == {"rounds": 2}


def test_an_engine_that_is_not_registered_is_asked_for():
    with pytest.raises(ConfigurationError, match=r"used the engine `printing`, which is not registered"):
        known_engine("auto", "auto", "printing")
