"""Auto never changes the result: what a trial finds of a module's own state, and what shows only later in a run."""

import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, SumMetric

from lightning_feddua import ConfigurationError, FederatedCallback
from lightning_feddua.engines import trial
from tests.engines.engine_runs import fit, shared
from tests.modules import Classifier


class Scaled(Classifier):
    """A loss that is multiplied by something of the module's own, in each step or only in later ones."""

    first_step = 0

    def __init__(self):
        super().__init__(dropout=0.0)
        self.calls = 0
        self.rng = np.random.default_rng(0)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.factor() if self.trainer.global_step >= self.first_step else loss


class Counts(Scaled):
    def factor(self):
        self.calls += 1
        return 1 + 0.1 * self.calls


class NumPyDraws(Scaled):
    def factor(self):
        return 1 + np.random.rand()


class PythonDraws(Scaled):
    def factor(self):
        return 1 + random.random()


class TorchDraws(Scaled):
    def factor(self):
        return 1 + torch.rand(())


class OwnDraws(Scaled):
    def factor(self):
        return 1 + self.rng.random()


@pytest.fixture
def vectorized_is_faster(monkeypatch):
    monkeypatch.setattr(trial, "predicted_speedup", lambda *counts: 9.0)


def same(first, second):
    return all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


@pytest.mark.usefixtures("vectorized_is_faster")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Counts, "its training step changes `self.calls`"),
        (OwnDraws, "its training step changes `self.rng`"),
        (NumPyDraws, "it draws random numbers in its steps, and would draw others"),
        (PythonDraws, "it draws random numbers in its steps, and would draw others"),
        (TorchDraws, "it draws random numbers in its steps, and would draw others"),
    ],
)
def test_auto_notices_state_and_says_so(make, reason, tmp_path):
    sequential, _ = fit("sequential", make, shared(), tmp_path, rounds=2)
    auto, loop = fit("auto", make, shared(), tmp_path, rounds=2)
    assert loop.engine_note == f"sequential (not vectorized: {reason})"
    assert same(auto, sequential)


@pytest.mark.parametrize("make", [Counts, OwnDraws, NumPyDraws, PythonDraws])
def test_what_a_stack_would_share_is_refused_where_a_stack_is_asked_for(make, tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot be vectorized: .*(changes `self|draws random numbers from)"):
        fit("vectorized", make, shared(), tmp_path)


@pytest.mark.usefixtures("vectorized_is_faster")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Counts, r"its training step changes `self\.calls`, which the clients of a stack share"),
        (OwnDraws, r"its training step changes `self\.rng`"),
        (NumPyDraws, r"it draws random numbers from NumPy in its steps"),
        (PythonDraws, r"it draws random numbers from Python's `random` in its steps"),
        (TorchDraws, r"it draws random numbers from torch in its steps"),
    ],
)
def test_what_shows_after_the_trial_is_trained_one_by_one(make, reason, tmp_path):
    late = type(make.__name__, (make,), {"first_step": 3})
    sequential, _ = fit("sequential", late, shared(), tmp_path, rounds=2, local_steps=5)
    with pytest.warns(UserWarning, match=reason) as warned:
        auto, loop = fit("auto", late, shared(), tmp_path, rounds=2, local_steps=5)
    assert loop.engine_note.startswith("vectorized")
    assert re.search("trained one by one", str(warned[0].message))
    # Updates of a stack are summed in another order.
    for name, value in sequential.state_dict().items():
        torch.testing.assert_close(auto.state_dict()[name], value, rtol=1e-4, atol=1e-5)


class Lazy(Classifier):
    """Composed metrics, and a submodule made in the first step."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.mean, self.sum = MeanMetric(), SumMetric()
        self.both = self.mean + self.sum

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "late"):
            self.late = nn.Identity()
        self.both.update(batch[0].mean())
        loss = super().training_step(batch, batch_idx)
        return self.late(loss) * (1 + self.both.compute().abs())


class AtStart(FederatedCallback):
    def on_fit_start(self, loop):
        module = loop.module
        self.late, self.updates = hasattr(module, "late"), module.mean.update_count
        self.names = [name for name, _ in module.named_modules()]


def test_a_trial_leaves_composed_metrics_and_late_submodules_alone(tmp_path):
    start, names = AtStart(), [name for name, _ in Lazy().named_modules()]
    auto, _ = fit("auto", Lazy, shared(), tmp_path, rounds=2, callbacks=start)
    assert (start.late, start.updates, start.names) == (False, 0, names)
    sequential, _ = fit("sequential", Lazy, shared(), tmp_path, rounds=2)
    assert same(auto, sequential)
