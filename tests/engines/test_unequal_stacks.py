"""Clients of unequal sizes in one stack, against the sequential engine."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_feddua import Combined, FedAvg, FedDualAvg, FedProx, MimeLite, Scaffold
from lightning_feddua.clients import AdaAlter, Mime
from lightning_feddua.data.client_data import minibatches
from lightning_feddua.engines import vectorized
from lightning_feddua.engines.base import LocalWork
from lightning_feddua.engines.stack_parts import parts
from lightning_feddua.engines.stacked_steps import StackedSteps
from tests.engines.engine_runs import assert_same, fit, plain, separate, shared
from tests.modules import Classifier

# With minibatches of 10: passes of 1 to 4 minibatches, with a last one of 10, 7, 5, 4 or 3 samples.
SIZES = (40, 27, 35, 4, 17, 20, 33, 27)
EPOCHS = {"local_epochs": 2, "local_steps": None, "batch_size": 10, "precision": "64-true", "rounds": 3}
SMALL = {"local_epochs": None, "local_steps": 4, "batch_size": 30}
SGD, Adam = torch.optim.SGD, torch.optim.Adam


def optimized(optimizer):
    return plain(lambda p: optimizer(p, 0.05))


def by_step(gamma):
    return lambda o: {"scheduler": torch.optim.lr_scheduler.ExponentialLR(o, gamma), "interval": "step"}


CASES = {
    "sgd": (optimized(SGD), {}),
    "momentum": (plain(lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True)), {}),
    "adam": (optimized(Adam), {}),
    "amsgrad": (plain(lambda p: Adam(p, 0.01, amsgrad=True)), {}),
    "nadam": (optimized(torch.optim.NAdam), {}),
    "adagrad": (optimized(torch.optim.Adagrad), {}),
    "rmsprop": (plain(lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True)), {}),
    "clipping": (optimized(SGD), {"gradient_clip_val": 0.3}),
    "step schedule": (plain(lambda p: SGD(p, 0.1), by_step(0.8)), {}),
    "epoch schedule": (plain(lambda p: SGD(p, 0.1), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)), {}),
    "decay": (optimized(SGD), {"local_lr_decay": 0.5}),
    "limit": (optimized(Adam), {"limit_train_batches": 3}),
    "fraction": (optimized(SGD), {"limit_train_batches": 0.7}),
    "small": (optimized(SGD), SMALL),
    "all small": (optimized(Adam), {"local_epochs": None, "local_steps": 4, "batch_size": 50}),
    "scaffold": (optimized(SGD), {"client": Scaffold}),
    "scaffold, I": (optimized(SGD), {"client": lambda: Scaffold(option="I")}),
    "mime": (optimized(SGD), {"client": Mime}),
    "mime lite": (optimized(SGD), {"client": lambda: MimeLite(statistics="adam")}),
    "prox": (optimized(Adam), {"client": lambda: FedProx(mu=0.3)}),
    "dual averaging": (optimized(SGD), {"client": lambda: FedDualAvg(l1=0.001), "server": FedAvg(), **SMALL}),
    "adaalter": (optimized(SGD), {"client": AdaAlter}),
    "combined": (optimized(SGD), {"client": lambda: Combined([FedProx(mu=0.3), Scaffold()])}),
}


def both(make, clients, tmp_path, client=None, **arguments):
    return [
        fit(engine, make, clients, tmp_path, **{**EPOCHS, **arguments}, **({"client": client()} if client else {}))
        for engine in ("sequential", "vectorized")
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error:.*trained one by one")
def test_same_as_one_by_one(case, tmp_path):
    make, arguments = CASES[case]
    results = both(make, shared(SIZES), tmp_path, **arguments)
    assert results[1][1].backend.engine_name == "vectorized"
    assert_same(*results, tolerance=1e-10)


@pytest.mark.filterwarnings("error:.*trained one by one")
@pytest.mark.parametrize("fewest", [1, 2, 9])
def test_vmapped_and_single_steps_give_the_same(fewest, tmp_path, monkeypatch):
    """Every part vmapped, every part of one client alone, and everything alone; in memory of each client's own."""
    monkeypatch.setattr(vectorized.VectorizedEngine, "fewest_together", fewest)
    assert_same(*both(optimized(Adam), separate(SIZES), tmp_path), tolerance=1e-10)


class Logs(Classifier):
    """Values of all kinds; and BatchNorm, whose buffers differ between clients."""

    def __init__(self):
        super().__init__(dropout=0.0)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mean_x", batch[0].mean())
        self.log("largest", batch[0].max(), reduce_fx="max")
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        self.log("weight", next(self.parameters()).flatten()[0])
        return loss


def test_logs_and_buffers_of_each_client(tmp_path):
    results = both(Logs, shared(SIZES), tmp_path, log_clients=True)
    assert_same(*results, tolerance=1e-10)
    assert results[0][1].history[-1]["samples"] == pytest.approx(2 * np.mean(SIZES))


def count_steps(monkeypatch):
    """The number of clients in each vmapped step, and 1 for each single one."""
    seen = []
    differentiate = StackedSteps._differentiate

    def counted(self, stack, own, parameters, batch_idx):
        seen.append(1 if own.part.alone else len(own.part.places))
        return differentiate(self, stack, own, parameters, batch_idx)

    monkeypatch.setattr(StackedSteps, "_differentiate", counted)
    return seen


def test_the_stack_shrinks_and_only_last_minibatches_run_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_feddua.engines.trial._decide", lambda auto, *rest: ("vectorized", "vectorized"))
    seen = count_steps(monkeypatch)
    fit("vectorized", optimized(SGD), shared((60, 50, 50, 45, 40, 40)), tmp_path, **{**EPOCHS, "rounds": 1})
    # 12, 10, 10, 10, 8 and 8 steps. Two of the fourth client's have five samples, which leaves three others the second
    # time, and at the end there is one client.
    assert seen == [6, 6, 6, 6, 6, 1, 6, 6, 6, 4, *[1] * 4, 1, 1]


@pytest.mark.filterwarnings("error:.*trained one by one")
@pytest.mark.parametrize("asked", ["batch_idx", "current_epoch", "num_training_batches"])
def test_who_asks_for_the_place_in_an_epoch_gets_a_stack_of_each_size(asked, tmp_path, monkeypatch):
    class Asks(Classifier):
        def __init__(self):
            super().__init__(dropout=0.0)

        def training_step(self, batch, batch_idx):
            asking = {
                "batch_idx": lambda: batch_idx,
                "current_epoch": lambda: self.current_epoch,
                "num_training_batches": lambda: self.trainer.num_training_batches,
            }
            return super().training_step(batch, batch_idx) / (asking[asked]() + 1)

    seen = count_steps(monkeypatch)
    results = both(Asks, shared((25, 15, 25, 15)), tmp_path, rounds=2)
    assert_same(*results, tolerance=1e-10)
    assert set(seen[-10:]) == {2}


class ChangesItsBatch(Classifier):
    def __init__(self):
        super().__init__(dropout=0.0)

    def training_step(self, batch, batch_idx):
        batch[0].mul_(2.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("batch_size", [10, 50])
def test_batches_changed_in_place_are_stacked_anew(batch_size, tmp_path):
    assert_same(*both(ChangesItsBatch, shared(SIZES), tmp_path, batch_size=batch_size), tolerance=1e-10)


class Recurrent(Classifier):
    """A fused kernel, which can be vmapped only together with its gradient."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.lstm, self.unused = nn.LSTM(4, 4, batch_first=True), nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        return super().training_step([self.lstm(batch[0][:, None])[0][:, 0], batch[1]], batch_idx)


def test_fused_kernels_of_unequal_clients(tmp_path):
    assert_same(*both(Recurrent, shared(SIZES), tmp_path, rounds=2), tolerance=1e-10)


class Tied(Classifier):
    """Two layers share their weight."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.first, self.second, self.net = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def training_step(self, batch, batch_idx):
        return super().training_step([self.second(self.first(batch[0]).relu()), batch[1]], batch_idx)


def test_tied_parameters_of_unequal_clients(tmp_path):
    assert_same(*both(Tied, shared(SIZES), tmp_path), tolerance=1e-10)


def test_ranks_agree(tmp_path):
    one = fit("vectorized", optimized(Adam), shared(SIZES), tmp_path, **EPOCHS)
    two = fit("vectorized", optimized(Adam), shared(SIZES), tmp_path, **EPOCHS, devices=2, strategy="ddp_fork")
    assert_same(one, two, tolerance=1e-10)


@pytest.mark.parametrize(
    "work",
    [
        LocalWork(None, 2, 10),
        LocalWork(None, 3, 10, limit=2),
        LocalWork(None, 2, 10, limit=0.5),
        LocalWork(None, 2, 10, drop_last=True),
        LocalWork(7, None, 10),
    ],
)
def test_sizes_of_minibatches_are_known_beforehand(work):
    for size in (3, 10, 11, 20, 39):
        drawn = minibatches(
            size, 10, np.random.default_rng(0), work.steps, work.epochs, work.pass_length(size)
        )  # fmt: skip
        assert work.minibatch_sizes(size) == [len(positions) for _, positions in drawn]


def test_parts_of_a_stack():
    taken = [part.taken for part in parts([20] * 9 + [5] + [20] * 3 + [7] * 4, fewest=4)]
    # The first computes the odd one among its clients in vain.
    assert taken == [slice(0, 13), slice(13, 17), 9]
    # Those that are far apart are copied out.
    assert [part.taken for part in parts([1, 2, 1, 2, 1, 2], fewest=3)] == [[0, 2, 4], [1, 3, 5]]
    assert [part.taken for part in parts([1, 2, 1], fewest=4)] == [0, 2, 1]
