"""Real ranks that die or hang in the middle of a run, and the same bits on any number of them."""

import os
import signal
import time

import pytest

from lightning_feddua import FedAdam, FedAvg, FedDuAdagrad, FedDuAdam, FederatedCallback, FederatedDataModule, Scaffold
from lightning_feddua.aggregation import lanes as lane_sums
from lightning_feddua.clients import AdaAlter, FedDualAvg, Mime, MimeLite, Scaffnew
from tests.forked_ranks import ForkedRanks, assert_same, fit, run
from tests.modules import Classifier, DropoutCNN, classification

RUNS = {
    "plain": (DropoutCNN, lambda: {"server": FedDuAdagrad(), "local_epochs": 1}),
    "scaffold": (DropoutCNN, lambda: {"server": FedDuAdagrad(), "client": Scaffold(), "local_steps": 3}),
    "samples": (
        lambda: DropoutCNN(batch_norm=True),
        lambda: {"server": FedAdam(), "client_weights": "samples", "local_epochs": 1},
    ),
}


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in RUNS if name != "plain")]
)
def test_the_number_of_ranks_does_not_change_a_bit(tmp_path, monkeypatch, name):
    model, arguments = RUNS[name]
    expected = run(1, tmp_path / "1", model, arguments())
    assert len(expected["history"]) == 20
    for world_size in (2, 3, 4):
        assert_same(run(world_size, tmp_path / str(world_size), model, arguments()), expected)
    # As with models of more parameters.
    monkeypatch.setattr(lane_sums, "_AT_ONCE", 0)
    assert_same(run(3, tmp_path / "apart", model, arguments()), expected)


@pytest.mark.parametrize("name", ["scaffold", "samples"])
def test_two_ranks_stop_and_three_go_on(tmp_path, name):
    model, arguments = RUNS[name]
    expected = run(1, tmp_path / "whole", model, {**arguments(), "max_rounds": 8})
    folder = tmp_path / "split"
    run(2, folder, model, {**arguments(), "max_rounds": 3, "checkpoint_every": 1})
    assert_same(run(3, folder, model, {**arguments(), "max_rounds": 8}, ckpt_path="last"), expected)


ALGORITHMS = {
    "Scaffold": (Scaffold, FedDuAdam, {}),
    "AdaAlter": (AdaAlter, FedDuAdam, {}),
    "Mime": (Mime, FedDuAdam, {}),
    "MimeLite": (lambda: MimeLite(statistics="adam"), FedDuAdam, {}),
    "Scaffnew": (Scaffnew, FedAvg, {"clients_per_round": None}),
    "FedDualAvg": (lambda: FedDualAvg(l1=0.01), FedAvg, {}),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_split_run_is_the_whole_run(tmp_path, name):
    client, server, more = ALGORITHMS[name]

    def arguments(**changes):
        return {"client": client(), "server": server(), "local_steps": 3, "max_rounds": 5, **more, **changes}

    expected = run(2, tmp_path / "whole", DropoutCNN, arguments())
    folder = tmp_path / "split"
    run(2, folder, DropoutCNN, arguments(max_rounds=2, checkpoint_every=1))
    assert_same(run(2, folder, DropoutCNN, arguments(), ckpt_path="last"), expected)


class Signal(FederatedCallback):
    """Sends its own process a signal in the third round."""

    def __init__(self, rank, number):
        self.rank, self.number = rank, number

    def on_round_start(self, loop, round):
        if (loop.fabric.global_rank, round) == (self.rank, 2):
            os.kill(os.getpid(), self.number)


def small_clients():
    return FederatedDataModule({str(i): classification(20, seed=i) for i in range(6)}, batch_size=10)


@pytest.mark.parametrize(
    ("number", "rank", "message"),
    [
        (signal.SIGSTOP, 1, "Rank 1 has ended, or not come to an exchange within the loop's `timeout`"),
        pytest.param(
            signal.SIGSTOP,
            0,
            "Rank 0, which keeps the ranks together, has ended, or does not answer",
            marks=pytest.mark.slow,
        ),
        (signal.SIGKILL, 2, "Rank 2 has ended, or not come to an exchange"),
    ],
    ids=["stopped", "first stopped", "killed"],
)
def test_a_rank_that_is_missing_is_named(tmp_path, number, rank, message):
    arguments = {"clients_per_round": None, "local_steps": 2, "timeout": 3.0, "callbacks": Signal(rank, number)}
    ranks = ForkedRanks(lambda: fit(tmp_path, Classifier, arguments, data=small_clients), 3, tmp_path)
    start = time.monotonic()
    others = [other for other in range(3) if other != rank]
    ranks.wait(30, others)
    waited = time.monotonic() - start
    ranks.kill()
    assert [ranks.codes[other] for other in others] == [1, 1]
    # Who comes later may be told by the end of the one who was told first.
    assert any(f"RankError: {message}" in ranks.output(other) for other in others), [ranks.output(o) for o in others]
    assert all("RankError: " in ranks.output(other) for other in others)
    assert waited < 25
