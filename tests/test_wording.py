"""Sentences that people read at the end of a run."""

import lightning.pytorch
import pytest

from lightning_feddua.callbacks import EarlyStopping
from tests.callbacks.test_early_stopping import Scores
from tests.modules import Classifier


def test_one_round_is_not_one_rounds(make_loop, clients, caplog):
    stopping = EarlyStopping("score", patience=1, mode="min")
    loop = make_loop(max_rounds=3, callbacks=[stopping, Scores([1.0, 2.0, 3.0])])
    with caplog.at_level("INFO"):
        loop.fit(Classifier(), clients)
    assert "Stopped after 2 rounds: `score` has not improved for 1 round. Resume" in caplog.text


@pytest.mark.parametrize("seconds", [0])
def test_the_end_of_a_timer(make_loop, clients, caplog, seconds):
    loop = make_loop(max_rounds=3, callbacks=lightning.pytorch.callbacks.Timer(duration={"seconds": seconds}))
    with caplog.at_level("INFO"):
        loop.fit(Classifier(), clients)
    assert "Stopped after 1 round: the time limit of 0 s is reached. Resume" in caplog.text


def test_a_trial_run_says_that_nothing_was_kept(make_loop, clients, capsys):
    make_loop(fast_dev_run=True, enable_progress_bar=True).fit(Classifier(), clients)
    assert capsys.readouterr().out.splitlines()[-1] == "fast_dev_run: nothing was kept"
