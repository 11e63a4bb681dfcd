"""Engines are found by name, class or import path; new ones need nothing of the package."""

import re

import numpy as np
import pytest
import torch

from lightning_feddua import ConfigurationError, FedAvg
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.engines import SequentialEngine, VectorizedEngine, register_engine
from lightning_feddua.engines.base import find_engine
from lightning_feddua.models import LinearRegression
from tests.engines.outside_engines import OneGradientStep, Printing, Unfinished
from tests.modules import Classifier


def fit(make_loop, engine, **arguments):
    torch.manual_seed(0)
    model = LinearRegression(dim=6, lr=0.05)
    loop = make_loop(engine=engine, server=FedAvg(), precision="64-true", **arguments)
    loop.fit(model, SyntheticRegression(num_clients=3, dim=6))
    return model.linear.weight.detach(), loop


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("sequential", SequentialEngine),
        ("vectorized", VectorizedEngine),
        (VectorizedEngine, VectorizedEngine),
        (Printing, Printing),
        ("tests.engines.outside_engines.Printing", Printing),
    ],
)
def test_what_an_engine_is_found_by(engine, expected):
    assert find_engine(engine) is expected


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            "parallel",
            "There is no engine `parallel`. Choose one of `auto`, `compiled`, `sequential`, `vectorized`, or give an",
        ),
        ("no_such_module.Engine", "There is no engine `no_such_module.Engine`: No module named 'no_such_module'."),
        ("tests.engines.outside_engines.Lost", "has no attribute 'Lost'. Choose one of `auto`"),
        ("tests.engines.outside_engines.NOT_AN_ENGINE", "is not a subclass of `Engine`. Choose one of"),
        (Classifier, "is not a subclass of `Engine`. Choose one of `auto`, `compiled`, `sequential`"),
        (Unfinished, "The engine `Unfinished` has no `name`, or no method `run`. Define both in the class."),
        (3, "The engine `3` is not a subclass of `Engine`."),
    ],
)
def test_what_is_no_engine_is_refused_before_a_run(make_loop, engine, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make_loop(engine=engine)


@pytest.mark.parametrize("engine", [Printing, "tests.engines.outside_engines.Printing"])
def test_an_engine_from_outside_prints_each_client_and_trains_as_before(make_loop, capsys, engine):
    weights, loop = fit(make_loop, engine)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert sorted(printed) == [f"round {r}: {i}" for r in range(3) for i in sorted(loop.client_ids)]
    assert torch.equal(weights, fit(make_loop, "sequential")[0])
    # It computes what its base class does, so their runs can continue each other.
    assert loop.engine_note == "sequential"


def test_an_engine_written_from_the_base_class(make_loop):
    weights, loop = fit(make_loop, OneGradientStep, max_rounds=1)
    start, gradients = np.zeros((1, 6)), []
    for client in SyntheticRegression(num_clients=3, dim=6).clients.values():
        x, y = (tensor.numpy() for tensor in client.tensors)
        gradients.append((x @ start.T - y).T @ x / len(x))
    np.testing.assert_allclose(weights.numpy(), start - 0.1 * np.mean(gradients, axis=0), rtol=1e-12)
    assert loop.engine_note == "one gradient step"


def test_an_engine_that_says_it_cannot_run_a_module_is_refused_with_the_reason(make_loop, clients):
    message = "The engine `one gradient step` cannot run `Classifier`: it has buffers. Use `engine="
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make_loop(engine=OneGradientStep).fit(Classifier(), clients)


def test_a_registered_engine_is_found_by_its_name_which_nobody_else_can_take(make_loop, monkeypatch):
    monkeypatch.setattr("lightning_feddua.engines.base._ENGINES", dict(find_engine.__globals__["_ENGINES"]))
    assert register_engine(OneGradientStep) is OneGradientStep
    assert torch.equal(fit(make_loop, "one gradient step")[0], fit(make_loop, OneGradientStep)[0])
    # As when a cell of a notebook runs twice.
    register_engine(type("OneGradientStep", (OneGradientStep,), {}))
    with pytest.raises(ConfigurationError, match="The name `sequential` of `Printing` is taken."):
        register_engine(Printing)
    with pytest.raises(ConfigurationError, match="The name `auto` of `Auto` is taken."):
        register_engine(type("Auto", (SequentialEngine,), {"name": "auto"}))
    with pytest.raises(ConfigurationError, match="Choose one of `auto`, `compiled`, `one gradient step`, `sequential`"):
        find_engine("other")


def test_a_run_is_resumed_by_an_engine_of_the_same_name(make_loop, tmp_path):
    whole, _ = fit(make_loop, Printing, out_dir=tmp_path / "whole")
    _, first = fit(make_loop, Printing, max_rounds=1, checkpoint_every=1)
    checkpoint = next(first.run_dir.rglob("*.ckpt"))
    for engine in ("sequential", Printing, "auto"):
        model = LinearRegression(dim=6, lr=0.05)
        loop = make_loop(engine=engine, server=FedAvg(), precision="64-true")
        loop.fit(model, SyntheticRegression(num_clients=3, dim=6), ckpt_path=checkpoint)
        assert torch.equal(model.linear.weight, whole)
    loop = make_loop(engine=OneGradientStep, server=FedAvg(), precision="64-true")
    with pytest.raises(ConfigurationError, match="used the sequential engine, and the one gradient step one would"):
        loop.fit(model, SyntheticRegression(num_clients=3, dim=6), ckpt_path=checkpoint)


def test_two_ranks_run_an_engine_from_outside(make_loop):
    weights, _ = fit(make_loop, OneGradientStep)
    both, _ = fit(make_loop, OneGradientStep, devices=2, strategy="ddp_fork")
    assert torch.equal(weights, both)
