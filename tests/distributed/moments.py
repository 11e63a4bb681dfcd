"""Moments of a run at which something may happen to a rank, from its start to its last exchange."""

import os
import random
from pathlib import Path

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_feddua import FedAvg, FederatedCallback, FederatedDataModule, FederatedLoop, Scaffold
from lightning_feddua.aggregation import client_states, simulation
from lightning_feddua.callbacks import checkpoint
from lightning_feddua.engines import trial
from lightning_feddua.launch import joining, launcher
from tests.modules import Classifier, classification

ROUNDS = 3
# Functions of the package before whose call something happens.
FUNCTIONS = {
    "launch": (joining, "_join"),
    "rehearsal": (simulation, "rehearse"),
    "trial": (trial, "_decide"),
    "move of states": (client_states, "pass_on"),
    "save": (checkpoint, "write_all"),
    "last barrier": (launcher, "barrier"),
}
# What only rank 0 does.
OF_RANK_ZERO = ("prepare data", "rehearsal", "trial", "save", "logger")
SET_UP = ("launch", "process group", "prepare data", "data", "module", "rehearsal", "trial")
IN_ROUNDS = (
    *("round start", "move of states", "training", "after the exchange", "validation", "metric", "callback", "vote"),
    *("logger", "save"),
)
MOMENTS = (*SET_UP, "sanity check", "fit start", *IN_ROUNDS, "fit end", "last barrier", "test", "predict")
# Cases of each moment that the slow tests try. All of them take minutes.
CASES_OF_A_MOMENT = int(os.environ.get("FEDDUA_TEST_MOMENTS", "1"))


def cases(every, ordinary):
    """Parameters of a test: the ordinary cases, and some of each moment for the slow tests.

    Args:
        every: all cases, as tuples.
        ordinary: those of the fast tests.
    """
    draw, some = random.Random(0), set()
    for moment in MOMENTS:
        known = [case for case in every if moment in case]
        some |= set(draw.sample(known, min(CASES_OF_A_MOMENT, len(known))))
    slow = [case for case in every if case in some and case not in ordinary]
    marked = [(case, ()) for case in ordinary] + [(case, pytest.mark.slow) for case in slow]
    return [pytest.param(*case, marks=mark, id="-".join(map(str, case))) for case, mark in marked]


class Act:
    """Does something on one rank when it comes to a moment, the first time or a later one.

    Args:
        moment: one of ``MOMENTS``.
        rank: on which rank; None for all.
        action: what.
        times: how often the rank comes to the moment before.
    """

    def __init__(self, moment, rank, action, times=0):
        self.moment, self.rank, self.action, self.times = moment, rank, action, times
        # Whether there has been a round: steps are also made before the first.
        self.begun = False

    def at(self, moment):
        if moment == self.moment and self.rank in (None, int(os.environ.get("RANK", 0))):
            self.times -= 1
            if self.times == -1:
                self.action()

    def before(self, moment, function):
        def call(*args, **kwargs):
            self.at(moment)
            return function(*args, **kwargs)

        return call


class Module(Classifier):
    def __init__(self, act):
        super().__init__(dropout=0.0)
        self._act = [act]
        self.mean = MeanMetric()
        # Not trained: whether steps move it is to be found out before the first round.
        self.teacher = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def setup(self, stage):
        self._act[0].at("module")

    def training_step(self, batch, batch_idx):
        if self._act[0].begun:
            self._act[0].at("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self._act[0].at("sanity check" if self.trainer.sanity_checking else "validation")
        self.mean.update(batch[1].float())
        self.log("mean", self.mean)
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self._act[0].at("test")
        self.log("test_loss", batch[0].mean())

    def predict_step(self, batch, batch_idx):
        self._act[0].at("predict")
        return batch[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(FederatedDataModule):
    def __init__(self, act):
        clients = {str(i): classification(20, seed=i) for i in range(7)}
        super().__init__(clients, classification(60, seed=9), batch_size=10, eval_batch_size=10)
        self.test_dataset = classification(60, seed=10)
        self._act = act

    def prepare_data(self):
        self._act.at("prepare data")

    def setup(self, stage):
        self._act.at("data")
        super().setup(stage)


class Moments(FederatedCallback):
    def __init__(self, act):
        self.act = act

    def on_fit_start(self):
        self.act.at("fit start")

    def on_round_start(self, loop, round):
        with (Path(loop.out_dir) / f"begun{loop.fabric.global_rank}.txt").open("a") as file:
            print(round, file=file)
        self.act.begun = True
        self.act.at("round start")

    def on_aggregate_end(self):
        self.act.at("after the exchange")

    def on_round_end(self, loop):
        self.act.at("callback")
        # As a user's own callback may.
        assert loop.fabric.all_reduce(torch.ones(1), reduce_op="sum") == loop.fabric.world_size
        self.act.at("vote")

    def on_fit_end(self):
        self.act.at("fit end")


def play(act, out_dir, ckpt_path=None, **arguments):
    """Fit, test and predict on this rank, with something that happens at a moment; returns the loop."""
    for moment, (owner, name) in FUNCTIONS.items():
        setattr(owner, name, act.before(moment, getattr(owner, name)))
    MeanMetric.sync = act.before("metric", MeanMetric.sync)
    defaults = {"max_rounds": ROUNDS, "local_steps": 2, "clients_per_round": 5, "checkpoint_every": 1, "timeout": 3.0}
    fixed = {"server": FedAvg(), "out_dir": out_dir, "enable_progress_bar": False, "accelerator": "cpu"}
    if act.moment != "trial":
        fixed |= {"client": Scaffold(), "reproducible": True}
    loop = FederatedLoop(**{**defaults, **fixed, **arguments}, callbacks=Moments(act))
    loop.fabric.log_dict = act.before("logger", loop.fabric.log_dict)
    init = torch.distributed.init_process_group
    torch.distributed.init_process_group = act.before("process group", init)
    torch.manual_seed(0)
    model, data = Module(act), Data(act)
    loop.fit(model, data, ckpt_path)
    loop.test(model, data)
    loop.predict(model, classification(1000))
    return loop
