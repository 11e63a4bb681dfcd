"""A run that stops and goes on is the run that never stopped."""

import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import TensorDataset

import lightning_feddua
from lightning_feddua import ConfigurationError, FedAvg, FedDuAdam, FederatedCallback, FederatedDataModule
from lightning_feddua.callbacks import Checkpoint
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.models import LinearRegression
from tests.checkpoints.checkpointed_runs import Scheduled, assert_same, clients, fit, in_child, lines, make, rows
from tests.modules import Classifier, classification

RULES = [
    *("FedAvg", "FedAvgM", "FedExP", "FedExPM", "FedAdagrad"),
    *("FedAdam", "FedYogi", "FedDuAdagrad", "FedDuAdam", "FedDuYogi"),
]


@pytest.fixture
def make_loop(tmp_path):
    return partial(make, out_dir=tmp_path)


@pytest.mark.parametrize("rule", RULES)
def test_split_run_is_the_whole_run(make_loop, tmp_path, rule):
    server = getattr(lightning_feddua, rule)
    whole = make_loop(server=server(), out_dir=tmp_path / "whole", engine="sequential")
    expected = fit(whole)
    assert expected.steps.sum() > 0
    fit(make_loop(server=server(), max_rounds=2, checkpoint_every=5))
    resumed = make_loop(server=server(), checkpoint_every=5)
    model = fit(resumed, ckpt_path="last")
    assert_same(model, expected)
    assert rows(resumed) == rows(whole)
    assert resumed.run_dir == tmp_path / "version_0"
    table = lines(resumed.run_dir / "metrics.csv")
    assert [row["round"] for row in table] == ["0", "1", "2", "3"]
    assert [float(row["eta_g"]) for row in table] == [row["eta_g"] for row in whole.history]


@pytest.mark.parametrize("split", [0, 1, 3])
def test_any_split_point(make_loop, tmp_path, split):
    """A checkpoint given by its path: the run goes on in a new folder, with the whole history."""
    whole = make_loop(server=FedDuAdam(), callbacks=Checkpoint(save_top_k=-1))
    expected = fit(whole)
    if split == 0:
        fit(make_loop(server=FedDuAdam(), max_rounds=0, callbacks=Checkpoint(save_top_k=-1)))
    folder = tmp_path / ("version_0" if split else "version_1")
    resumed = make_loop(server=FedDuAdam(), callbacks=Checkpoint(save_top_k=-1))
    model = fit(resumed, ckpt_path=folder / f"round-{split:04d}.ckpt")
    assert resumed.run_dir not in (folder, whole.run_dir)
    assert_same(model, expected)
    assert rows(resumed) == rows(whole)
    assert [row["round"] for row in lines(resumed.run_dir / "metrics.csv")] == ["0", "1", "2", "3"]
    first, second = (torch.load(loop.run_dir / "last.ckpt", weights_only=True) for loop in (whole, resumed))
    for key in ("state_dict", "averaged_state_dict"):
        assert all(torch.equal(first[key][name], second[key][name]) for name in first[key])


def test_the_engine_stays_and_so_do_the_bits(make_loop, tmp_path, monkeypatch):
    data = SyntheticRegression(num_clients=6, samples_per_client=10, dim=20, batch_size=4)
    arguments = {"precision": "64-true", "client_weights": "samples", "gradient_clip_val": 1.0}
    whole = make_loop(**arguments, engine="vectorized", out_dir=tmp_path / "whole")
    expected = fit(whole, LinearRegression(dim=20), data)
    fit(make_loop(**arguments, engine="vectorized", max_rounds=2, checkpoint_every=1), LinearRegression(dim=20), data)

    # A trial would decide anew.
    monkeypatch.delattr("lightning_feddua.engines.trial._decide")
    resumed = make_loop(**arguments, engine="auto")
    model = fit(resumed, LinearRegression(dim=20), data, ckpt_path="last")
    assert resumed.backend.engine_name == "vectorized"
    assert_same(model, expected)
    assert rows(resumed) == rows(whole)
    with pytest.raises(ConfigurationError, match=r"used the vectorized engine, and the sequential one would"):
        fit(make_loop(**arguments, engine="sequential"), LinearRegression(dim=20), data, ckpt_path="last")


def test_low_precision_keeps_the_servers_weights(make_loop, tmp_path):
    whole = make_loop(precision="bf16-true", out_dir=tmp_path / "whole")
    expected = fit(whole)
    fit(make_loop(precision="bf16-true", max_rounds=2, checkpoint_every=1))
    resumed = make_loop(precision="bf16-true")
    assert_same(fit(resumed, ckpt_path="last"), expected)
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.weights.dtype == torch.float32


def test_last_starts_afresh_where_there_is_nothing(make_loop, tmp_path, caplog):
    (tmp_path / "version_7").mkdir()
    with caplog.at_level("INFO"):
        loop = make_loop(max_rounds=1, enable_checkpointing=False)
        fit(loop, ckpt_path="last")
    assert "There is no checkpoint in" in caplog.text
    assert loop.run_dir == tmp_path / "version_8"
    assert not list(tmp_path.glob("**/*.ckpt"))


def test_rows_after_the_checkpoint_are_cut_off(make_loop):
    """Killed between two checkpoints: round 3 is in the CSV but not in the checkpoint."""

    class Kill(FederatedCallback):
        def on_round_start(self, round):
            if round == 4:
                os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: fit(make_loop(max_rounds=5, checkpoint_every=3, callbacks=[Kill()]))) == -signal.SIGKILL
    resumed = make_loop(max_rounds=5)
    run_dir = resumed.out_dir / "version_0"
    assert [row["round"] for row in lines(run_dir / "metrics.csv")] == ["0", "1", "2", "3"]
    stop = make_loop(max_rounds=3)
    fit(stop, ckpt_path="last")
    assert [row["round"] for row in lines(run_dir / "metrics.csv")] == ["0", "1", "2"]
    fit(resumed, ckpt_path="last")
    assert [row["round"] for row in lines(run_dir / "metrics.csv")] == ["0", "1", "2", "3", "4"]


def test_loggers_go_on(make_loop, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def loggers():
        return [CSVLogger(tmp_path / "csv", name="x"), TensorBoardLogger(tmp_path / "tb", name="x")]

    # The round after the checkpoint's is logged twice, and counts once.
    fit(make_loop(max_rounds=3, callbacks=[Checkpoint(every=2, save_top_k=-1)], loggers=loggers()))
    (tmp_path / "version_0/last.ckpt").unlink()
    (tmp_path / "version_0/round-0003.ckpt").unlink()
    loop = make_loop(max_rounds=4, loggers=loggers())
    fit(loop, ckpt_path="last")
    assert [p.name for p in (tmp_path / "csv/x").iterdir()] == ["version_0"]
    assert [row["step"] for row in lines(tmp_path / "csv/x/version_0/metrics.csv")] == ["0", "1", "2", "3"]
    assert [p.name for p in (tmp_path / "tb/x").iterdir()] == ["version_0"]
    events = EventAccumulator(str(tmp_path / "tb/x/version_0")).Reload().Scalars("eta_g")
    assert [event.step for event in events] == [0, 1, 2, 3]
    assert [event.value for event in events] == pytest.approx([row["eta_g"] for row in loop.history])


def test_resume_in_the_same_process(make_loop, tmp_path):
    logger = CSVLogger(tmp_path / "csv", name="x")
    loop = make_loop(max_rounds=2, checkpoint_every=1, loggers=logger)
    fit(loop)
    loop.max_rounds = 3
    fit(loop, ckpt_path="last")
    assert [row["step"] for row in lines(tmp_path / "csv/x/version_0/metrics.csv")] == ["0", "1", "2"]


class Remembers(FederatedCallback):
    """Has a state of its own."""

    def __init__(self):
        self.seen = []

    def on_round_end(self, round):
        self.seen.append(round)

    def state_dict(self):
        return {"seen": np.int64(len(self.seen))}

    def load_state_dict(self, state):
        self.seen = ["before"] * state["seen"]


def test_callbacks_keep_their_state(make_loop):
    fit(make_loop(max_rounds=2, checkpoint_every=1, callbacks=Remembers()))
    callback = Remembers()
    fit(make_loop(max_rounds=3, callbacks=callback), ckpt_path="last")
    assert callback.seen == ["before", "before", 2]
    with pytest.warns(
        UserWarning,
        match=r"has a state of `tests\.checkpoints\.test_resume\.Remembers 0`, which this run does not have",
    ):
        fit(make_loop(max_rounds=3), ckpt_path="last")


def test_an_ordinary_lightning_checkpoint(make_loop):
    loop = make_loop(checkpoint_every=4)
    trained = fit(loop, Scheduled(dropout=0.1, lr=0.03))
    path = loop.run_dir / "last.ckpt"
    loaded = Scheduled.load_from_checkpoint(path, weights_only=True)
    assert (loaded.hparams.dropout, loaded.hparams.lr) == (0.1, 0.03)
    for name, value in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert torch.load(path, weights_only=True)["state_dict"]._metadata == trained.state_dict()._metadata

    # The averaged iterate is the one whose metrics are logged under plain names.
    loaded.load_state_dict(torch.load(path, weights_only=True)["averaged_state_dict"])
    metrics = make_loop().validate(loaded, clients())
    assert metrics["val_loss"] == loop.history[-1]["val_loss"]
    assert metrics["val_loss"] != loop.history[-1]["last_iterate/val_loss"]


def test_best_rounds_are_kept(make_loop):
    class Score(FederatedCallback):
        scores = [3.0, 1.0, float("nan"), 2.0, 1.5]

        def on_round_end(self, loop, round):
            loop.history[-1]["score"] = self.scores[round]

    def files(rounds, monitor, k, ckpt_path=None):
        checkpoint = Checkpoint(every=1, monitor=monitor, mode="min", save_top_k=k)
        loop = make_loop(max_rounds=rounds, callbacks=[checkpoint, Score()])
        fit(loop, ckpt_path=ckpt_path)
        return sorted(path.name for path in loop.run_dir.glob("*.ckpt"))

    assert files(3, "score", 2) == ["last.ckpt", "round-0001.ckpt", "round-0002.ckpt"]
    assert files(5, "score", 2, ckpt_path="last") == ["last.ckpt", "round-0002.ckpt", "round-0005.ckpt"]
    assert files(3, None, 2) == ["last.ckpt", "round-0002.ckpt", "round-0003.ckpt"]
    assert files(3, None, -1) == ["last.ckpt", "round-0001.ckpt", "round-0002.ckpt", "round-0003.ckpt"]
    assert files(3, None, 1) == ["last.ckpt"]
    with pytest.raises(
        ConfigurationError, match=r"`Checkpoint` monitors `nothing`, which is not logged\. .*`val_loss`"
    ):
        files(1, "nothing", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"server": FedAvg()}, r"`server` was `FedDuAdam` and is `FedAvg`\. Resume with"),
        ({"server": FedDuAdam(beta2=0.9)}, r"`server\.beta2` was `0\.99` and is `0\.9`"),
        ({"local_steps": 4}, r"`local_steps` was `3` and is `4`"),
        ({"seed": 1}, r"`seed` was `0` and is `1`"),
        ({"clients_per_round": 2}, r"`clients_per_round` was `3` and is `2`"),
        ({"precision": "64-true"}, r"`precision` was `32-true` and is `64-true`"),
        ({"max_rounds": 1}, r"has 2 rounds, more than `max_rounds=1`"),
        ({"model": Scheduled(lr=0.1)}, r"`optimizer 0, group 0, lr` was `0\.05` and is `0\.1`"),
        ({"model": Scheduled(width=9)}, r"`hyperparameter width` was `8` and is `9`"),
        ({"data": clients("abc")}, r"the number of clients was `4` and is `3`"),
        ({"data": clients("abcx")}, r"the name of a client changed"),
        ({"data": clients(size=21)}, r"the size of a client changed"),
        ({"data": clients(shift=0.01)}, r"the data of client `a` changed"),
    ],
)
def test_what_does_not_fit_is_refused(make_loop, arguments, message):
    fit(make_loop(server=FedDuAdam(), max_rounds=2, checkpoint_every=5))
    model, data = arguments.pop("model", None), arguments.pop("data", None)
    loop = make_loop(**{"server": FedDuAdam(), **arguments})
    with pytest.raises(ConfigurationError, match=message):
        fit(loop, model, data, ckpt_path="last")


def test_samples_that_differ_by_rounding_or_by_chance_are_the_same(make_loop):
    class Augmented(TensorDataset):
        calls = 0

        def __getitem__(self, index):
            Augmented.calls += 1
            x, y = super().__getitem__(index)
            return x + 0.01 * Augmented.calls, y

    augmented = FederatedDataModule({name: Augmented(*classification(20).tensors) for name in "abc"})

    class Computed(TensorDataset):
        factor = 1.0

        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x * type(self).factor, y

    class Rounded(Computed):
        factor = 1.0 + 1e-7

    computed, rounded = (
        FederatedDataModule({name: kind(*classification(20).tensors) for name in "abc"}) for kind in (Computed, Rounded)
    )
    for data, again in ((computed, rounded), (augmented, augmented)):
        fit(make_loop(max_rounds=1, checkpoint_every=1), None, data)
        fit(make_loop(max_rounds=2), None, again, ckpt_path="last")


def test_what_cannot_be_loaded_again_is_found_before_training(make_loop):
    class Extra(Scheduled):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"array": np.zeros(3)}

    with pytest.raises(ConfigurationError, match=r"`mine\.array` is a `ndarray`, which a checkpoint cannot hold"):
        fit(make_loop(checkpoint_every=1), Extra())

    class Hyper(Classifier):
        def __init__(self, activation):
            super().__init__()
            self.save_hyperparameters()

    loop = make_loop(max_rounds=1, checkpoint_every=1)
    with pytest.warns(UserWarning, match="The hyperparameter `activation` is a `ReLU` and is not kept in checkpoints"):
        fit(loop, Hyper(nn.ReLU()))
    Hyper.load_from_checkpoint(loop.run_dir / "last.ckpt", activation=nn.ReLU(), weights_only=True)


def test_what_hooks_add_to_the_default_checkpoint_never_ends_a_run(make_loop):
    class Adds(Classifier):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["hyper_parameters"]["loss"] = nn.L1Loss()
            checkpoint["special"] = {"loss": nn.L1Loss(), "plain": 3}

    loop = make_loop(max_rounds=1)
    with pytest.warns(UserWarning, match="hyperparameter `loss`") as warned:
        fit(loop, Adds())
    assert any("`special.loss` is a `L1Loss`" in str(warning.message) for warning in warned)
    checkpoint = torch.load(loop.run_dir / "last.ckpt", weights_only=True)
    assert checkpoint["special"] == {"plain": 3}
    assert checkpoint["hyper_parameters"] == {"dropout": 0.5, "lr": 0.01}


def test_two_ranks_go_on_as_one(make_loop, tmp_path):
    """In float64, where other orders of summation differ by little."""
    arguments = {"precision": "64-true", "server": FedDuAdam()}
    forked = {"devices": 2, "strategy": "ddp_fork"}
    whole = make_loop(**arguments, out_dir=tmp_path / "whole")
    expected = fit(whole)
    fit(make_loop(**arguments, **forked, max_rounds=2, checkpoint_every=1))
    for continued in (make_loop(**arguments, checkpoint_every=1, max_rounds=3), make_loop(**arguments, **forked)):
        model = fit(continued, ckpt_path="last")
    for (name, a), (_, b) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, msg=name)
    assert [row["round"] for row in continued.history] == [0, 1, 2, 3]
    for row, other in zip(rows(continued), rows(whole), strict=True):
        assert row == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint_every": 0}, "`checkpoint_every=0` is less than 1. Give"),
    ],
)
def test_bad_settings(make_loop, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        make_loop(**arguments)


@pytest.mark.parametrize("arguments", [{"every": 0}, {"mode": "most"}, {"save_top_k": -2}])
def test_bad_checkpoint_settings(arguments):
    with pytest.raises(ConfigurationError):
        Checkpoint(**arguments)
