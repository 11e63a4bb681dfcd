"""``local_lr_decay`` multiplies whatever rate the module's own schedule gives, however that is written."""

import math

import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils.data import TensorDataset

from lightning_feddua import FedAvg

DECAY, ROUNDS, STEPS = 0.25, 3, 8
# What modules have seen; what they keep themselves is undone after each client.
PATH = []
ONE_SAMPLE = {"a": TensorDataset(torch.ones(1, 1))}


class Absolute:
    """A scheduler in the manner of timm: it writes absolute rates, and is told the number of updates."""

    def __init__(self, optimizer):
        self.optimizer, self.updates = optimizer, 0

    def step(self, updates):
        self.updates = updates
        for group in self.optimizer.param_groups:
            group["lr"] = 0.3 / (1 + updates)

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]


SCHEDULERS = {
    "none": None,
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "cosine with eta_min": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.04),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, eta_min=0.04),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=STEPS + 1, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3, cycle_momentum=False),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "swa": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=4),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 5, eta_min=0.03)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "absolute": Absolute,
}


class Moves(LightningModule):
    """Each step moves the weight by the learning rate."""

    def __init__(self, scheduler=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.make_scheduler = scheduler
        PATH.clear()

    def training_step(self, batch, batch_idx):
        PATH.append(self.weight.item())
        return self.weight.sum()

    def on_train_end(self):
        PATH.append(self.weight.item())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.make_scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": self.make_scheduler(optimizer), "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        if isinstance(scheduler, Absolute):
            scheduler.step(self.global_step)
        else:
            super().lr_scheduler_step(scheduler, metric)


def rates_of(module, make_loop, **arguments):
    """The rate of each step, a row for each round."""
    loop = make_loop(server=FedAvg(), max_rounds=ROUNDS, local_steps=STEPS, precision="64-true",
                     local_lr_decay=DECAY, engine="sequential", **arguments)  # fmt: skip
    loop.fit(module, ONE_SAMPLE)
    return -np.diff(np.reshape(PATH, (ROUNDS, STEPS + 1)))


def check(rates, expected):
    np.testing.assert_allclose(rates, np.outer(DECAY ** np.arange(ROUNDS), expected), rtol=1e-7)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_rate_is_the_schedulers_own_times_the_decay(name, make_loop):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = None if SCHEDULERS[name] is None else SCHEDULERS[name](optimizer)
    expected = []
    for step in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*[step + 1] * isinstance(scheduler, Absolute))
    check(rates_of(Moves(SCHEDULERS[name]), make_loop), expected)


class WarmsUpInStep(Moves):
    """As Lightning's documentation shows it."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (self.trainer.global_step + 1)


class WarmsUpInHook(Moves):
    def on_train_batch_start(self, batch, batch_idx):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * (self.global_step + 1)


class WarmsUpInTrainingStep(Moves):
    def training_step(self, batch, batch_idx):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * (self.global_step + 1)
        return super().training_step(batch, batch_idx)


class ByHand(Moves):
    """Manual optimization, with a scheduler of absolute rates."""

    def __init__(self):
        super().__init__(lambda o: lr_scheduler.LambdaLR(o, lambda t: t + 1))
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.lr_schedulers().step()


@pytest.mark.parametrize("make", [WarmsUpInStep, WarmsUpInHook, WarmsUpInTrainingStep, ByHand])
def test_rates_that_the_module_writes_itself(make, make_loop):
    check(rates_of(make(), make_loop), 0.1 * np.arange(1, STEPS + 1))


def test_a_training_step_sees_the_rate_that_is_used(make_loop):
    seen = []

    class Sees(Moves):
        def training_step(self, batch, batch_idx):
            seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

    module = Sees(SCHEDULERS["cosine with eta_min"])
    np.testing.assert_allclose(rates_of(module, make_loop).ravel(), seen, rtol=1e-7)


def test_without_decay_the_rates_are_the_modules_own_objects(make_loop):
    class Sees(Moves):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert self.trainer.optimizers[0].param_groups[0]["lr"] == 0.1
            assert self.trainer.local_optimizers.decayed(self.trainer.optimizers[0]) is None

    make_loop(server=FedAvg(), max_rounds=2, local_steps=2).fit(Sees(), ONE_SAMPLE)


def test_both_engines_decay_alike(make_loop):
    """Without hooks, so that clients can be stacked."""

    class Plain(LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def training_step(self, batch, batch_idx):
            return self.weight.sum()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=0.04)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    rates = [0.04 + 0.06 * (1 + math.cos(math.pi * t / STEPS)) / 2 for t in range(STEPS)]
    expected = -sum(rates) * (1 + DECAY + DECAY**2)
    data = {name: TensorDataset(torch.ones(1, 1)) for name in "ab"}
    for arguments in ({"engine": "sequential"}, {"engine": "vectorized"}):
        module = Plain()
        make_loop(server=FedAvg(), max_rounds=3, local_steps=STEPS, precision="64-true", local_lr_decay=DECAY,
                  **arguments).fit(module, data)  # fmt: skip
        assert module.weight.item() == pytest.approx(expected, rel=1e-6)
