"""Every argument of the loop is written once: its check, its place in the signature, its part in a run's identity."""

import inspect
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import nn

from lightning_feddua import ClipUpdateNorm, ConfigurationError, FedAvg, FederatedCallback, FederatedLoop, LocalTraining
from lightning_feddua.settings import FIXED, RunSettings
from tests.checkpoints.checkpointed_runs import rewrite_in_format_1
from tests.modules import Classifier, DropoutCNN, images

NOT_WHOLE = (2.5, "5", True, None)


@pytest.mark.parametrize("value", NOT_WHOLE)
@pytest.mark.parametrize("name", ["max_rounds", "seed", "validate_every"])
def test_whole_numbers(name, value):
    with pytest.raises(ConfigurationError, match=rf"`{name}=.*` is not (a whole number|allowed)\. "):
        FederatedLoop(**{"local_steps": 1, name: value})


@pytest.mark.parametrize("value", [2.5, "5", True])
@pytest.mark.parametrize("name", ["local_steps", "local_epochs", "lanes", "checkpoint_every"])
def test_whole_numbers_that_may_be_left_out(name, value):
    with pytest.raises(ConfigurationError, match=rf"`{name}=.*` is not a whole number\. Give one from 1 up"):
        FederatedLoop(**{**({} if "local" in name else {"local_steps": 1}), name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_clip_val": "10"}, r"`gradient_clip_val='10'` is not a number"),
        ({"local_lr_decay": True}, r"`local_lr_decay=True` is not a number"),
        ({"timeout": float("nan")}, r"`timeout=nan` is not a number"),
        ({"compile": "yes"}, r"`compile=yes` is not known\. Choose True, False or `auto`"),
        ({"channels_last": 1}, r"`channels_last=1` is neither True nor False"),
        ({"clients_per_round": "3"}, r"`clients_per_round='3'` is not a number"),
        ({"clients_per_round": True}, r"`clients_per_round=True` is not a number"),
        ({"callbacks": [FedAvg]}, r"The callback is .*FedAvg.*\. Give a `FederatedCallback` or a `Callback` of"),
        ({"transforms": "clip"}, r"The transform is `'clip'`\. Give an instance of `UpdateTransform`"),
        ({"sampler": "uniform"}, r"The sampler is `'uniform'`\. Give an instance of `ClientSampler`"),
        ({"client": "FedProx"}, r"The client is `'FedProx'`\. Give an instance of `LocalTraining`"),
        ({"on_client_error": "ignore"}, r"There is no on_client_error `ignore`"),
    ],
)
def test_types_and_ranges(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        FederatedLoop(local_steps=1, **arguments)


def test_numpy_numbers_are_numbers(tmp_path):
    loop = FederatedLoop(
        local_steps=np.int64(2), max_rounds=np.int32(1), clients_per_round=np.int64(3), out_dir=tmp_path
    )
    assert (loop.local_steps, loop.max_rounds) == (2, 1)


def test_an_unknown_argument_is_an_error():
    with pytest.raises(ConfigurationError, match=r"no argument `max_round`\. Write `max_rounds`"):
        FederatedLoop(local_steps=1, max_round=3)


def test_the_signature_and_the_documentation_are_those_of_the_settings():
    parameters = inspect.signature(FederatedLoop).parameters
    assert list(parameters) == [field.name for field in fields(RunSettings)]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert parameters["max_rounds"].default == 500
    assert parameters["max_rounds"].annotation is int
    for name in parameters:
        assert f"\n        {name}: " in FederatedLoop.__doc__, name


def test_settings_are_read_and_changed_through_the_loop(tmp_path):
    loop = FederatedLoop(local_steps=1, max_rounds=3, out_dir=tmp_path)
    assert loop.max_rounds == loop.settings.max_rounds == 3
    loop.max_rounds = 5
    assert loop.settings.max_rounds == 5
    with pytest.raises(ConfigurationError, match=r"`max_rounds=-1` is less than 0"):
        loop.max_rounds = -1
    assert loop.max_rounds == 5
    assert "precision" in FIXED
    with pytest.raises(AttributeError, match=r"`precision` cannot be changed after the loop is made\. Make another"):
        loop.precision = "64-true"
    with pytest.raises(AttributeError, match="no attribute `max_round`"):
        _ = loop.max_round


def test_a_fit_leaves_what_the_loop_shows(make_loop, clients):
    loop = make_loop()
    assert (loop.weights, loop.average, loop.module, loop.datamodule, loop.cohort_size) == (None,) * 5
    assert (loop.history, loop.client_ids, loop.current_round, loop.eta_g) == ([], [], 0, 0.0)
    assert loop.run_dir == loop.out_dir
    assert not loop.stopping
    model = Classifier()
    loop.fit(model, clients)
    assert torch.equal(loop.weights, torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert len(loop.history) == 3
    assert loop.run_dir.parent == loop.out_dir


def test_the_parent_of_forked_ranks_knows_what_they_did(make_loop, clients):
    model = Classifier()
    loop = make_loop(devices=2, strategy="ddp_fork", engine="sequential")
    loop.fit(model, clients)
    assert torch.equal(loop.weights, torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert loop.average.shape == loop.weights.shape
    assert not torch.equal(loop.average, loop.weights)
    assert (len(loop.history), loop.current_round) == (3, 2)
    assert loop.eta_g == loop.history[-1]["eta_g"]
    assert (loop.run_dir / "metrics.csv").is_file()


def deciding():
    """Another value for each setting that decides the result."""
    others = {
        "clients_per_round": 2,
        "local_steps": 5,
        "client_weights": "samples",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
        "gradient_clip_algorithm": "value",
        "local_lr_decay": 0.5,
        "compile": True,
        "reproducible": True,
        "threads": 2,
        "channels_last": True,
        "lanes": None,
        "max_update_norm": 0.1,
        "seed": 1,
        "precision": "64-true",
        "server": FedAvg(eta_g=0.5),
        "client": type("Other", (LocalTraining,), {})(),
    }
    known = {field.name for field in fields(RunSettings) if field.metadata["decides"]}
    # Tried in the tests of each: they need a class of their own, or exclude each other.
    assert known == others.keys() | {"local_epochs", "limit_train_batches", "sampler", "transforms"}
    return others


@pytest.mark.parametrize("name", deciding())
def test_a_run_is_not_resumed_with_another_setting_that_decides_its_result(make_loop, name):
    data = {str(i): images(12, i) for i in range(4)}
    first = make_loop(server=FedAvg(), engine="sequential", max_rounds=1, checkpoint_every=1)
    first.fit(DropoutCNN(), data)
    arguments = {"server": FedAvg(), "engine": "sequential", "max_rounds": 2, name: deciding()[name]}
    with pytest.raises(ConfigurationError, match=rf"belongs to another run: (`{name}|the model's)"):
        make_loop(**arguments).fit(DropoutCNN(), data, ckpt_path=first.run_dir / "last.ckpt")


def test_resuming_with_channels_last_does_not_scramble_weights(make_loop):
    """Memory formats order the elements of a convolution differently in the flat vector."""
    data = {str(i): images(12, i) for i in range(2)}
    first = make_loop(max_rounds=1, checkpoint_every=1, engine="sequential")
    first.fit(DropoutCNN(), data)
    with pytest.raises(ConfigurationError, match=r"`channels_last` was `False` and is `True`"):
        make_loop(channels_last=True).fit(DropoutCNN(), data, ckpt_path=first.run_dir / "last.ckpt")


def test_the_parent_of_forked_ranks_shows_who_took_part(make_loop, clients):
    loop = make_loop(devices=2, strategy="ddp_fork", engine="sequential", clients_per_round=2, checkpoint_every=1)
    loop.fit(Classifier(), clients)
    assert (loop.engine_note, loop.cohort_size, loop.client_ids) == ("sequential", 2, ["a", "b", "c", "d"])
    assert loop.identity["settings"]["clients_per_round"] == 2


def test_a_callback_may_stop_the_run(make_loop, clients):
    class Stop(FederatedCallback):
        def on_round_end(self, loop, round):
            loop.stopping = round == 1

    loop = make_loop(callbacks=Stop(), max_rounds=5, checkpoint_every=10)
    loop.fit(Classifier(), clients)
    assert len(loop.history) == 2
    assert (loop.run_dir / "last.ckpt").is_file()


@pytest.mark.parametrize("name", ["server", "client", "backend", "callbacks"])
def test_parts_of_a_loop_are_not_exchanged(make_loop, name):
    loop = make_loop()
    with pytest.raises(AttributeError, match=f"`{name}` cannot be changed after the loop is made"):
        setattr(loop, name, getattr(loop, name))


def test_a_server_may_leave_out_arguments_of_its_hook(make_loop, clients):
    class Moves(FedAvg):
        def on_aggregate_end(self, loop):
            loop.weights.add_(1.0)
            loop.eta_g = 2.0

    loop = make_loop(server=Moves(), max_rounds=1)
    loop.fit(Classifier(), clients)
    assert loop.history[0]["eta_g"] == 2.0


def test_numpy_numbers_are_compared_by_value(make_loop, clients):
    first = make_loop(local_steps=np.int64(2), seed=np.int64(5), max_rounds=1, checkpoint_every=1)
    first.fit(Classifier(), clients)
    path = first.run_dir / "last.ckpt"
    make_loop(local_steps=2, seed=5, max_rounds=2).fit(Classifier(), clients, path)
    with pytest.raises(ConfigurationError, match="`local_steps` was `2` and is `3`"):
        make_loop(local_steps=np.int64(3), seed=5).fit(Classifier(), clients, path)


class TwoConvolutions(DropoutCNN):
    """With more than one channel, which memory formats order differently."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels_last": True}, "its weights have another memory format"),
        ({"transforms": [ClipUpdateNorm(1.0)]}, r"`transforms` was `None` and is `\['ClipUpdateNorm'\]`"),
    ],
)
def test_checkpoints_from_before_a_setting_existed(make_loop, arguments, message):
    data = {str(i): images(12, i) for i in range(2)}
    first = make_loop(max_rounds=1, checkpoint_every=1, engine="sequential")
    first.fit(TwoConvolutions(), data)
    path = first.run_dir / "last.ckpt"

    def older(checkpoint):
        for name in ("channels_last", "compile", "sampler", "transforms"):
            del checkpoint["federated"]["identity"]["settings"][name]

    rewrite_in_format_1(path, older)
    make_loop(max_rounds=2).fit(TwoConvolutions(), data, path)
    with pytest.raises(ConfigurationError, match=message):
        make_loop(**arguments).fit(TwoConvolutions(), data, path)
