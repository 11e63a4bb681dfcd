"""A run that is stopped ends in order, in the same round on all ranks, and can be resumed."""

import shlex
from functools import partial

import pytest
import torch

from lightning_feddua import FederatedCallback
from lightning_feddua.checkpoints.files import read
from lightning_feddua.cli import main
from tests.checkpoints.checkpointed_runs import Scheduled, assert_same, clients, fit, make, rows
from tests.experiments.test_compare import write_recipe


@pytest.fixture
def make_loop(tmp_path):
    return partial(make, out_dir=tmp_path, engine="sequential")


class StopAfter(FederatedCallback):
    """Asks for the end in a round, on one rank, in a hook; and notes what it sees."""

    def __init__(self, round, rank=0, hook="on_round_end"):
        self.round, self.rank = round, rank
        self.ended = False
        setattr(type(self), hook, lambda self, loop, round: self.ask(loop, round))

    def ask(self, loop, round):
        if (round, loop.fabric.global_rank) == (self.round, self.rank):
            loop.should_stop = True
            assert loop.should_stop

    def on_fit_end(self, loop):
        assert loop.stopping
        self.ended = True

    def state_dict(self):
        return {"ended": self.ended}

    def load_state_dict(self, state):
        self.ended = state["ended"]


class StopsInAClient(Scheduled):
    """The client that trains on the most samples, in the second round."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.current_round == 1 and self.trainer.num_training_batches == 3:
            self.trainer.should_stop = True


def stopping(hook, rank):
    return type("StopAfter", (StopAfter,), {})(1, rank, hook)


@pytest.mark.parametrize(
    ("devices", "rank", "hook"),
    [
        (1, 0, "on_round_end"),
        (2, 1, "on_round_end"),
        (1, 0, "on_round_start"),
        (2, 1, "on_round_start"),
        (2, 0, "on_client_end"),
    ],
)
def test_a_stopped_run_ends_in_order_and_goes_on_later(make_loop, tmp_path, devices, rank, hook, caplog):
    ranks = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    whole = make_loop(out_dir=tmp_path / "whole", **ranks)
    expected = fit(whole)
    callback = stopping(hook, rank)
    stopped = make_loop(callbacks=callback, **ranks)
    with caplog.at_level("INFO"):
        fit(stopped)
    assert callback.ended
    assert len(stopped.history) == 2
    if devices == 1:
        assert "Stopped after 2 rounds: `should_stop` was set. Resume with `loop.fit(model, datamodule," in caplog.text
    resumed = make_loop(**ranks)
    assert_same(fit(resumed, ckpt_path="last"), expected)
    assert rows(resumed) == rows(whole)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_module_may_stop_the_run(make_loop, devices):
    """`trainer.should_stop`, set in a client on one rank."""
    loop = make_loop(clients_per_round=None, devices=devices, strategy="auto" if devices == 1 else "ddp_fork")
    fit(loop, StopsInAClient())
    assert len(loop.history) == 2


def test_the_wish_can_be_taken_back(make_loop):
    class Undecided(FederatedCallback):
        def on_round_start(self, loop, round):
            loop.should_stop = True

        def on_round_end(self, loop, round):
            loop.should_stop = False

    loop = make_loop(callbacks=Undecided())
    fit(loop)
    assert len(loop.history) == 4


def test_a_run_leaves_its_model(make_loop, tmp_path):
    """By default, and nowhere if that is not wanted."""
    loop = make_loop(max_rounds=2)
    model = fit(loop)
    assert [path.name for path in tmp_path.glob("**/*.ckpt")] == ["last.ckpt"]
    loaded = Scheduled.load_from_checkpoint(loop.run_dir / "last.ckpt", weights_only=True)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    without = make_loop(enable_checkpointing=False, callbacks=stopping("on_round_end", 0))
    fit(without)
    assert len(without.history) == 2
    assert not list(without.run_dir.glob("*.ckpt"))


def test_what_a_checkpoint_cannot_hold_does_not_end_a_run_that_did_not_ask_for_one(make_loop):
    class Extra(Scheduled):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = object()
            checkpoint["other"] = 1

    loop = make_loop(max_rounds=1)
    with pytest.warns(UserWarning, match=r"`mine` is a `object`, which a checkpoint cannot hold.* It is left out"):
        fit(loop, Extra())
    assert read(loop.run_dir / "last.ckpt")["other"] == 1


@pytest.mark.parametrize("package", ["lightning_feddua", "lightning.pytorch"])
def test_the_printed_command_resumes_the_run(tmp_path, package, caplog, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "--config", write_recipe(tmp_path / "tiny.yaml"), "--loop.out_dir", "runs"]
    rounds = ["--loop.max_rounds", "6", "--loop.engine", "sequential"]
    assert main([*arguments, *rounds]) == 0
    longer = "feddua fit --config runs/version_0/recipe.yaml --ckpt_path runs/version_0/last.ckpt"
    assert f"to train longer: {longer} --loop.max_rounds 12\n" in capsys.readouterr().out
    callbacks = tmp_path / "stop.yaml"
    callbacks.write_text(f"""loop: {{callbacks: [{{class_path: {package}.callbacks.EarlyStopping, init_args:
        {{monitor: val_loss, patience: 2, min_delta: 1000.0}}}}]}}""")
    with caplog.at_level("INFO"):
        assert main([*arguments, *rounds, "--config", str(callbacks)]) == 0
    assert "Stopped after 3 rounds: `val_loss` has not improved for 2 rounds." in caplog.text
    command = caplog.text.partition("Resume with `")[2].partition("`")[0]
    assert command == "feddua fit --config runs/version_1/recipe.yaml --ckpt_path runs/version_1/last.ckpt"
    program, *rest = shlex.split(command)
    assert main(rest) == 0
    # It waits for an improvement still, and stops after one round more.
    assert len(read(tmp_path / "runs/version_2/last.ckpt")["federated"]["history"]) == 4
    assert main([*rest, "--loop.callbacks", "null"]) == 0
    first, resumed = (read(tmp_path / f"runs/version_{n}/last.ckpt")["federated"] for n in (0, 3))
    assert all(torch.equal(first["weights"][name], resumed["weights"][name]) for name in first["weights"])


def test_the_printed_commands_can_be_pasted(tmp_path, monkeypatch, capsys):
    """In a folder with a space and a quote; what is printed after a finished run makes it longer."""
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path / "tiny.yaml")
    arguments = ["--config", recipe, "--loop.out_dir", "bob's runs/a", "--loop.max_rounds", "2"]
    assert main(["fit", *arguments]) == 0
    command = capsys.readouterr().out.rpartition("to train longer: ")[2].splitlines()[0]
    assert main(shlex.split(command)[1:]) == 0
    assert len(read(tmp_path / "bob's runs/a/version_1/last.ckpt")["federated"]["history"]) == 4
    loop = make(max_rounds=1, out_dir="bob's runs/b", enable_progress_bar=True)
    model = fit(loop)
    command = capsys.readouterr().out.rpartition("to train longer: ")[2].splitlines()[0]
    exec(command, {"loop": loop, "model": model, "datamodule": clients()})
    assert len(loop.history) == 2


def test_a_checkpoint_with_all_rounds_makes_no_folder(make_loop, tmp_path, caplog):
    loop = make_loop(max_rounds=1)
    expected = fit(loop)
    resumed = make_loop(max_rounds=1)
    with caplog.at_level("INFO"):
        assert_same(fit(resumed, ckpt_path=loop.run_dir / "last.ckpt"), expected)
    assert "last.ckpt` has 1 round, all of `max_rounds`. Raise it to train longer." in caplog.text
    assert rows(resumed) == rows(loop)
    assert resumed.run_dir == loop.run_dir
    assert [path.name for path in tmp_path.iterdir()] == ["version_0"]
