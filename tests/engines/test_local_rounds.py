"""What engines ask of a client algorithm: changes in place, and exactly the numbers that it names."""

import re

import numpy as np
import pytest
import torch

from lightning_feddua import ConfigurationError, FedAvg, LocalTraining
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.engines.base import find_engine
from lightning_feddua.models import LinearRegression

ENGINES = ["sequential", "vectorized"]


def fit(make_loop, client, **arguments):
    model = LinearRegression(dim=4, lr=0.1)
    loop = make_loop(server=FedAvg(), client=client, precision="64-true", **arguments)
    loop.fit(model, SyntheticRegression(num_clients=3, dim=4))
    return model.linear.weight.detach()


class Corrects(LocalTraining):
    def correct(self, gradient, weights, local):
        return gradient * 0.5


class Projects(LocalTraining):
    def project(self, weights, local):
        return weights.clamp(-1, 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("client", [Corrects(), Projects()])
@pytest.mark.parametrize("on_client_error", ["raise", "skip"])
def test_a_result_that_would_be_lost_is_one_clear_error(make_loop, engine, client, on_client_error):
    method = "correct" if isinstance(client, Corrects) else "project"
    message = f"`{type(client).__name__}.{method}` returned a `Tensor`, which would be lost. It must change its first"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        fit(make_loop, client, engine=engine, on_client_error=on_client_error)


class Halves(LocalTraining):
    def correct(self, gradient, weights, local):
        gradient.mul_(0.5)


class HalvesAndReturns(LocalTraining):
    def correct(self, gradient, weights, local):
        return gradient.mul_(0.5)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_changed_argument_itself_may_be_returned(make_loop, engine):
    results = [fit(make_loop, client, engine=engine) for client in (Halves(), HalvesAndReturns(), LocalTraining())]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


class Sends(LocalTraining):
    """The norm of the update, the number of steps, and a number that is gathered step by step."""

    client_scalars = ("norm", "steps", "path")

    def start(self, local):
        local.scalars["path"] = 0.0

    def correct(self, gradient, weights, local):
        local.scalars["path"] = local.scalars["path"] + gradient.square().sum(dim=-1)

    def finish(self, delta, local):
        local.scalars["norm"] = delta.norm(dim=-1)
        local.scalars["steps"] = local.step
        return {}


def updates(make_loop, monkeypatch, client, engine, **arguments):
    """The clients' updates of a round, as the engine gives them."""
    found, cls = [], find_engine(engine)
    run = cls.run

    def recorded(self, clients, state, events):
        for update in run(self, clients, state, events):
            found.append((update.client.name, update.delta.clone(), update.scalars))
            yield update

    with monkeypatch.context() as patch:
        patch.setattr(cls, "run", recorded)
        fit(make_loop, client, engine=engine, max_rounds=3, **arguments)
    # The trial trains clients as well.
    return sorted(found[-9:], key=lambda item: item[0])


@pytest.mark.parametrize("compile", [False, True])
def test_scalars_of_each_client_on_both_engines(make_loop, monkeypatch, compile, recwarn):
    sequential = updates(make_loop, monkeypatch, Sends(), "sequential")
    vectorized = updates(make_loop, monkeypatch, Sends(), "vectorized", compile=compile)
    assert not [w for w in recwarn if "not compiled" in str(w.message)]
    for (name, delta, scalars), (other, _, others) in zip(sequential, vectorized, strict=True):
        assert name == other
        assert scalars.keys() == others.keys() == {"norm", "steps", "path"}
        for key, value in scalars.items():
            assert value.dtype == others[key].dtype == torch.float64
            assert value.shape == others[key].shape == ()
            np.testing.assert_allclose(value, others[key], rtol=1e-9)
        assert scalars["norm"].item() == pytest.approx(np.linalg.norm(delta.numpy()), rel=1e-12)
        assert scalars["steps"] == 4
        assert scalars["path"] > 0


def sending(names, values):
    class Other(LocalTraining):
        client_scalars = names

        def finish(self, delta, local):
            local.scalars.update(values(delta))
            return {}

    return Other()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("client", "message"),
    [
        (sending(("norm",), lambda delta: {}), "names `norm` in `client_scalars` but does not set `local.scalars['n"),
        (sending((), lambda delta: {"norm": 1.0}), "sets `local.scalars['norm']`, which `client_scalars` does not"),
        (sending(("norm",), lambda delta: {"norm": delta}), "sets `local.scalars['norm']` to a tensor of shape ("),
    ],
)  # fmt: skip
def test_scalars_are_those_that_are_named(make_loop, engine, client, message):
    with pytest.raises(ConfigurationError, match=re.escape(f"`Other` {message}")):
        fit(make_loop, client, engine=engine, on_client_error="skip")
