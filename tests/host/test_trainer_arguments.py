"""Arguments that the loop shares with Trainer do what they do there, bit for bit."""

import copy

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader

from lightning_feddua import ConfigurationError, FederatedDataModule
from lightning_feddua.clients import Mime
from lightning_feddua.data.client_data import minibatches
from lightning_feddua.engines.base import Clipping, LocalWork
from tests.host.parity_modules import (
    LBFGS,
    BatchNormAndDropout,
    Common,
    DictOutput,
    EpochScheduler,
    Hooks,
    ManualDictOutput,
    StepScheduler,
    labelled,
)
from tests.host.parity_runs import BATCH, check_parity, trained_by_loop, trained_by_trainer

# What modules have noted; what they keep themselves is undone after each client.
SEEN = []


class Watches(Common):
    """Notes the order of everything that accumulation moves."""

    def note(self, what, *values):
        SEEN.append((what, self.global_step, self.current_epoch, *values))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note("batch end", batch_idx, float(outputs["loss"]), self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_before_zero_grad(self, optimizer):
        self.note("zero grad", type(optimizer).__name__)

    def on_before_backward(self, loss):
        self.note("backward", float(loss.detach()))

    def on_before_optimizer_step(self, optimizer):
        self.note("before step", float(self.net[0].weight.grad.abs().sum()))

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.note("step", epoch, batch_idx)
        optimizer.step(closure=optimizer_closure)

    def on_train_epoch_end(self):
        self.note("epoch end", self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for _ in range(2)]
        return [optimizer], [
            {"scheduler": schedulers[0], "interval": "step"},
            {"scheduler": schedulers[1], "interval": "epoch"},
        ]


MODULES = [Common, BatchNormAndDropout, StepScheduler, EpochScheduler, DictOutput, Hooks, LBFGS, Watches]


# 32 samples are 4 minibatches, 44 are 6, the last of them smaller, and 5 are less than one.
@pytest.mark.parametrize("size", [32, 44, 5])
@pytest.mark.parametrize("accumulate", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", MODULES)
def test_accumulated_gradients(make, accumulate, size, tmp_path):
    torch.manual_seed(0)
    check_parity(make(), [labelled(size)], tmp_path, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", [Watches, type("WatchesAndSkips", (Watches,), {"on_train_batch_start": None})])
def test_hooks_and_schedulers_fire_when_they_do_under_trainer(make, accumulate, tmp_path):
    if make is not Watches:
        make.on_train_batch_start = lambda self, batch, batch_idx: -1 if batch_idx == 4 else None
    torch.manual_seed(0)
    ours, data = make(), labelled(44)
    SEEN.clear()
    trained_by_trainer(ours, data, tmp_path, accumulate_grad_batches=accumulate)
    theirs = list(SEEN)
    SEEN.clear()
    trained_by_loop(ours, [data], tmp_path, accumulate_grad_batches=accumulate)
    assert theirs == SEEN
    assert {event[0] for event in SEEN} >= {"batch end", "zero grad", "backward", "before step", "step"}


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_accumulation_in_other_precisions(precision, tmp_path):
    torch.manual_seed(0)
    check_parity(BatchNormAndDropout(), [labelled(44)], tmp_path, accumulate_grad_batches=3, precision=precision)


def test_local_steps_count_optimizer_steps(tmp_path):
    """As ``max_steps`` does: with passes of 4 minibatches, 2 of which make a step."""
    torch.manual_seed(0)
    ours, data = Watches(), labelled(32)
    arguments = {"accumulate_grad_batches": 2}
    SEEN.clear()
    theirs, expected = trained_by_trainer(ours, data, tmp_path, epochs=-1, max_steps=5, **arguments), list(SEEN)
    SEEN.clear()
    states, loop = trained_by_loop(ours, [data], tmp_path, epochs=None, local_steps=5, **arguments)
    assert all(torch.equal(states[0][name], value) for name, value in theirs.state_dict().items())
    assert expected == SEEN
    assert max(event[1] for event in SEEN) == 5


def test_a_step_reads_as_many_minibatches_also_over_the_end_of_a_pass(make_loop):
    class Counts(Common):
        def on_train_start(self):
            self.read = self.steps = 0

        def on_train_batch_start(self, batch, batch_idx):
            self.read += 1

        def on_before_optimizer_step(self, optimizer):
            self.steps += 1

        def on_train_end(self):
            assert (self.read, self.steps) == (12, 4)

    loop = make_loop(local_steps=4, accumulate_grad_batches=3, max_rounds=1)
    loop.fit(Counts(), FederatedDataModule({"a": labelled(20), "b": labelled(3)}, batch_size=BATCH))


def test_a_step_of_accumulated_minibatches_is_one_of_a_large_minibatch(make_loop):
    """Not bit for bit: the oracle is the mean gradient over all samples."""
    torch.manual_seed(0)
    models = [Common() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, batch, accumulate in zip(models, (24, 8), (1, 3), strict=True):
        model.configure_optimizers = lambda model=model: torch.optim.SGD(model.parameters(), lr=0.5)
        loop = make_loop(max_rounds=1, local_epochs=1, accumulate_grad_batches=accumulate, precision="64-true")
        loop.fit(model, FederatedDataModule({"a": labelled()}, batch_size=batch))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("arguments", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_manual_optimization_does_these_itself(make_loop, arguments):
    with pytest.raises(
        ConfigurationError, match=r"`ManualDictOutput` makes its steps itself .*would do nothing\. Leave"
    ):
        make_loop(**arguments).fit(ManualDictOutput(), {"a": labelled()})


def test_some_algorithms_need_one_minibatch_per_step(make_loop):
    with pytest.raises(ConfigurationError, match=r"`Mime` compares each step's gradient .*\. Use"):
        make_loop(client=Mime(), accumulate_grad_batches=2).fit(Common(), {"a": labelled()})


class AsksForClipping(Common):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        assert (gradient_clip_val, gradient_clip_algorithm) == (
            self.trainer.gradient_clip_val,
            self.trainer.gradient_clip_algorithm,
        )
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("algorithm", [None, "norm", "value"])
@pytest.mark.parametrize("make", [Common, AsksForClipping])
def test_clipping(make, algorithm, accumulate, tmp_path):
    torch.manual_seed(0)
    arguments = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    check_parity(make(), [labelled(44)], tmp_path, **arguments, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_of_a_stack_of_clients(algorithm, tmp_path):
    torch.manual_seed(0)
    datasets = [labelled(24), labelled(24)]
    module, arguments = Common(), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.5)
    start = copy.deepcopy(module.state_dict())
    states = []
    for engine in ("sequential", "vectorized"):
        module.load_state_dict(start)
        states.append(trained_by_loop(module, datasets, tmp_path, engine=engine, precision="64-true", **arguments)[0])
    for sequential, vectorized in zip(*states, strict=True):
        for name, value in sequential.items():
            torch.testing.assert_close(vectorized[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("limit", [1, 3, 100, 0.5, 0.34, 1.0, 5.0, None])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_limited_passes(limit, accumulate, tmp_path):
    torch.manual_seed(0)
    arguments = {"limit_train_batches": limit, "accumulate_grad_batches": accumulate}
    check_parity(Watches(), [labelled(44), labelled(29)], tmp_path, **arguments)


def test_a_small_client_trains_on_one_minibatch_at_least(tmp_path):
    assert LocalWork(None, 1, BATCH, limit=0.1).pass_length(44) == 1
    states, _ = trained_by_loop(Common(), [labelled(44), labelled(5)], tmp_path, limit_train_batches=0.1)
    assert len(states) == 2


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("size", [44, 40])
def test_passes_without_the_odd_last_minibatch(size, limit, accumulate, tmp_path):
    torch.manual_seed(0)
    arguments = {"limit_train_batches": limit, "accumulate_grad_batches": accumulate}
    check_parity(Watches(), [labelled(size)], tmp_path, drop_last=True, **arguments)


def test_stacks_of_limited_passes(tmp_path):
    torch.manual_seed(0)
    module = Common()
    start = copy.deepcopy(module.state_dict())
    arguments = {"drop_last": True, "limit_train_batches": 0.7, "precision": "64-true"}
    states = []
    for engine in ("sequential", "vectorized"):
        module.load_state_dict(start)
        datasets = [labelled(44), labelled(29), labelled(44)]
        _, loop = trained_by_loop(module, datasets, tmp_path, engine=engine, **arguments)
        assert loop.backend.engine_name == engine
        states.append(copy.deepcopy(module.state_dict()))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("drop_last", [False, True])
def test_drop_last_is_that_of_the_loader(drop_last):
    class Data(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(labelled(), batch_size=5, shuffle=True, drop_last=drop_last)

    data = FederatedDataModule.from_datamodule(Data(), [range(12), range(12, 24)])
    data.setup("fit")
    assert data.drop_last is drop_last
    pooled = FederatedDataModule({"a": labelled()}, batch_size=5, drop_last=drop_last)
    assert len(pooled.train_dataloader()) == (4 if drop_last else 5)


def test_how_long_training_is():
    """Minibatches, optimizer steps and ends of passes, counted one by one."""
    for size in (3, 8, 20, 24, 44):
        for work in (
            LocalWork(None, 2, BATCH),
            LocalWork(None, 2, BATCH, accumulate=4),
            LocalWork(None, 3, BATCH, Clipping(1.0), 2, 0.5, drop_last=True),
            LocalWork(7, None, BATCH, accumulate=3),
        ):
            steps = None if work.steps is None else work.batches(size)
            rng = np.random.default_rng(0)
            passes = [e for e, _ in minibatches(size, BATCH, rng, steps, work.epochs, work.pass_length(size))]
            assert len(passes) == work.batches(size)
            for index in range(len(passes) - 1):
                assert work.ends_pass(size, index) == (passes[index] != passes[index + 1])
            if work.steps is None:
                per_pass = passes.count(0)
                assert work.optimizer_steps(size) == work.epochs * -(-per_pass // work.accumulate)
