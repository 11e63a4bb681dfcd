"""EarlyStopping over rounds decides as Lightning's does over epochs."""

import math
import random

import lightning.pytorch
import pytest
import pytorch_lightning
import torch

from lightning_feddua import ConfigurationError, FederatedCallback
from lightning_feddua.callbacks import EarlyStopping
from lightning_feddua.callbacks.translated import StoppedEarly
from tests.modules import Classifier


class Scores(FederatedCallback):
    """Puts given values into the history."""

    def __init__(self, values, name="score"):
        self.values, self.name = values, name

    def on_round_end(self, loop, round):
        if self.values[round] is not None:
            loop.history[-1][self.name] = self.values[round]


class FakeTrainer:
    """What Lightning's callback asks Trainer for."""

    fast_dev_run = sanity_checking = should_stop = False
    strategy = type("Strategy", (), {"reduce_boolean_decision": staticmethod(lambda stop, all: stop)})
    world_size = 1

    def __init__(self, values):
        self.current_epoch = -1
        self._values = values
        self.state = type("State", (), {"fn": "fit"})

    @property
    def callback_metrics(self):
        return {"score": torch.tensor(self._values[self.current_epoch], dtype=torch.float64)}


def decisions_of_lightning(package, values, **arguments):
    callback = package.callbacks.EarlyStopping("score", check_on_train_epoch_end=True, **arguments)
    trainer, seen = FakeTrainer(values), []
    for _ in values:
        trainer.current_epoch += 1
        callback.on_train_epoch_end(trainer, None)
        seen.append(
            (trainer.should_stop, callback.best_score.item(), callback.wait_count, callback.stopping_reason.name)
        )
        if trainer.should_stop:
            break
    return seen


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "min"},
        {"mode": "max"},
        {"mode": "min", "patience": 1, "min_delta": 0.3},
        {"mode": "max", "patience": 2, "min_delta": 0.3},
        {"mode": "min", "patience": 0},
        {"mode": "min", "patience": 50, "stopping_threshold": 0.1},
        {"mode": "max", "patience": 50, "stopping_threshold": 1.9},
        {"mode": "min", "patience": 50, "divergence_threshold": 1.8},
        {"mode": "max", "patience": 50, "divergence_threshold": 0.2},
        {"mode": "min", "patience": 4, "check_finite": False},
    ],
    ids=str,
)
def test_decisions_are_lightnings(package, arguments):
    draw = random.Random(0)
    special = [math.nan, math.inf, -math.inf, 1.0, 1.0]
    for _ in range(60):
        values = [draw.choice(special) if draw.random() < 0.08 else draw.uniform(0, 2) for _ in range(20)]
        ours = StoppedEarly(package.callbacks.EarlyStopping("score", **arguments))
        seen = []
        for round, value in enumerate(values):
            reason = ours.decide(value, round)
            seen.append((reason is not None, ours.best_score, ours.wait_count, ours.stopping_reason))
            if reason is not None:
                break
        assert seen == decisions_of_lightning(package, values, **arguments)


def test_a_run_ends_when_its_metric_stops_improving(make_loop, clients, caplog):
    stopping = EarlyStopping("score", patience=2, mode="min")
    loop = make_loop(max_rounds=10, callbacks=[stopping, Scores([3.0, 2.0, 2.5, 2.1, 1.0])])
    with caplog.at_level("INFO"):
        loop.fit(Classifier(), clients)
    assert len(loop.history) == 4
    assert (stopping.best_score, stopping.best_round, stopping.wait_count, stopping.stopped_round) == (2.0, 1, 2, 3)
    assert "Stopped after 4 rounds: `score` has not improved for 2 rounds. Resume with `loop.fit(" in caplog.text
    # A new run begins anew.
    loop.fit(Classifier(), clients)
    assert len(loop.history) == 4


def test_patience_counts_validated_rounds(make_loop, clients):
    stopping = EarlyStopping("val_loss", patience=2, min_delta=100.0)
    loop = make_loop(max_rounds=30, validate_every=3, callbacks=stopping)
    loop.fit(Classifier(), clients)
    # The first, in round 2, is better than none.
    assert len(loop.history) == 9


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_resumed_run_ends_in_the_same_round(make_loop, clients, split):
    values = [3.0, 2.0, 2.5, 2.1, 2.2, 1.0]
    first = make_loop(max_rounds=split, callbacks=[EarlyStopping("score", mode="min"), Scores(values)])
    first.fit(Classifier(), clients)
    resumed = make_loop(max_rounds=6, callbacks=[EarlyStopping("score", mode="min"), Scores(values)])
    resumed.fit(Classifier(), clients, ckpt_path="last")
    assert len(resumed.history) == 5


def test_the_mode_is_known_by_the_name():
    assert EarlyStopping("val_loss").mode == "min"
    assert EarlyStopping("val_acc").mode == "max"
    assert EarlyStopping("val_acc", mode="min").mode == "min"


def test_an_unknown_metric_is_an_error_that_names_the_others(make_loop, clients):
    with pytest.raises(ConfigurationError, match=r"monitors `val_los`, which is not logged\. Choose .*`val_loss`"):
        make_loop(callbacks=EarlyStopping("val_los")).fit(Classifier(), clients)
    with pytest.raises(ConfigurationError, match=r"monitors `val_loss`, but nothing is validated: `validate_every=0`"):
        make_loop(callbacks=EarlyStopping("val_loss"), validate_every=0).fit(Classifier(), clients)
    loop = make_loop(callbacks=EarlyStopping("val_los", strict=False))
    loop.fit(Classifier(), clients)
    assert len(loop.history) == 3


@pytest.mark.parametrize("arguments", [{"mode": "most"}, {"patience": -1}, {"min_delta": math.nan}])
def test_bad_settings(arguments):
    with pytest.raises(ConfigurationError):
        EarlyStopping("val_loss", **arguments)


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_lightnings_callback_has_the_results(make_loop, clients, package, caplog):
    callback = package.callbacks.EarlyStopping("score", patience=2, verbose=True)
    loop = make_loop(max_rounds=10, callbacks=[callback, Scores([3.0, 2.0, 2.5, 2.1, 1.0])])
    with caplog.at_level("INFO"):
        loop.fit(Classifier(), clients)
    assert "Round 1: `score` has improved by 1 to 2." in caplog.text
    assert len(loop.history) == 4
    assert (callback.best_score.item(), callback.wait_count, callback.stopped_epoch) == (2.0, 2, 3)
    assert callback.stopping_reason.name == "PATIENCE_EXHAUSTED"
    assert callback.stopping_reason_message == "`score` has not improved for 2 rounds"


def test_in_forked_ranks_and_from_there(make_loop, clients):
    callback = lightning.pytorch.callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0)
    loop = make_loop(max_rounds=10, callbacks=callback, devices=2, strategy="ddp_fork")
    loop.fit(Classifier(), clients)
    assert len(loop.history) == 2
    assert (callback.wait_count, callback.stopped_epoch) == (1, 1)
