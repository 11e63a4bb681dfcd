"""The contract between the loop and any server rule, with real loops."""

import copy

import numpy as np
import pytest
import torch

from lightning_feddua import (
    ConfigurationError,
    FedAvg,
    FedAvgM,
    FedDuAdagrad,
    FedDualAvg,
    FedDuAServer,
    FederatedLoop,
    FedExP,
    FedMid,
    PNorm,
    RoundUpdate,
    Scaffnew,
    Server,
)
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.models import LinearRegression


def fit(server, tmp_path, ckpt_path=None, **arguments):
    settings = {"max_rounds": 2, "local_steps": 2, "precision": "64-true", "enable_progress_bar": False}
    loop = FederatedLoop(server=server, out_dir=tmp_path, engine="sequential", **{**settings, **arguments})
    model = LinearRegression(dim=6)
    loop.fit(model, SyntheticRegression(dim=6, num_clients=3), ckpt_path)
    return loop, model.linear.weight.detach().clone()


class Returns(Server):
    """``w += Δ̄``, and whatever is to be returned."""

    def __init__(self, value):
        self._value = value

    def step(self, weights, update):
        weights.add_(update.mean_delta)
        return self._value


@pytest.mark.parametrize("value", [None, "fast", [1.0], torch.ones(2), 1 + 2j, True], ids=str)
def test_a_step_that_returns_no_number_is_one_clear_error(value, tmp_path):
    with pytest.raises(ConfigurationError, match=r"`Returns.step` returned `.*`, which is not a number\. Return the"):
        fit(Returns(value), tmp_path)


@pytest.mark.parametrize("value", [2, np.float32(2), torch.tensor(2.0), torch.tensor(2), np.array(2.0)], ids=type)
def test_any_number_will_do(value, tmp_path):
    loop, weights = fit(Returns(value), tmp_path)
    assert [(type(row["eta_g"]), row["eta_g"]) for row in loop.history] == [(float, 2.0)] * 2
    assert torch.equal(weights, fit(FedAvg(), tmp_path)[1])


def test_a_step_that_is_not_finite_is_a_number(tmp_path):
    with pytest.warns(UserWarning, match="not finite"):
        loop, _ = fit(Returns(float("nan")), tmp_path)
    assert np.isnan(loop.history[0]["eta_g"])


def test_a_rule_without_a_step_is_none():
    with pytest.raises(TypeError, match="abstract"):
        Server()


def test_the_layout_is_that_of_the_fit():
    server, layout = Returns(1.0), object()
    with pytest.raises(ConfigurationError, match=r"`Returns` asks for the layout .* Call `set_up\(layout\)` first"):
        server.layout  # noqa: B018
    server.set_up(layout)
    assert server.layout is layout


class Adaptive(Returns):
    adaptive = True


def test_an_adaptive_rule_is_evaluated_on_the_average_of_two_iterates(tmp_path):
    for rule, averaged in ((Returns, False), (Adaptive, True)):
        loop, _ = fit(rule(1.0), tmp_path)
        assert ("last_iterate/val_loss" in loop.history[0]) is averaged


def test_a_copy_of_a_server_has_a_state_of_its_own():
    server = FedDuAdagrad()
    other, weights = copy.deepcopy(server), torch.zeros(2)
    other.step(weights, RoundUpdate(torch.ones(2), torch.ones(1)))
    assert weights.norm() > 0
    assert "s" not in server.state_dict()


class Remembers(Server):
    """Momentum, with a state that is saved."""

    def __init__(self, beta=0.5):
        self.beta = beta
        self.reset()

    def reset(self):
        self._u = None

    def step(self, weights, update):
        self._u = update.mean_delta.clone() if self._u is None else self._u.mul_(self.beta).add_(update.mean_delta)
        weights.add_(self._u)
        return 1.0

    def state_dict(self):
        return {"u": self._u}

    def load_state_dict(self, state):
        self._u = state["u"]


def test_a_rule_with_a_state_resumes_bit_for_bit(tmp_path):
    _, whole = fit(Remembers(), tmp_path, max_rounds=4)
    fit(Remembers(), tmp_path, max_rounds=2, checkpoint_every=1)
    loop, resumed = fit(Remembers(), tmp_path, "last", max_rounds=4)
    assert len(loop.history) == 4
    assert torch.equal(resumed, whole)
    with pytest.raises(ConfigurationError, match=r"`server.beta` was `0.5` and is `0.1`"):
        fit(Remembers(0.1), tmp_path, "last", max_rounds=4)


def test_a_checkpoint_knows_compilation_by_the_name_of_the_setting_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_feddua.servers.passes.COMPILED_SERVER_SIZE", 1)
    loop, _ = fit(FedDuAdagrad(), tmp_path, checkpoint_every=1, compile=True)
    settings = {name for name in loop.identity["settings"] if name.startswith("server")}
    assert settings == {"server"} | {
        f"server.{name}"
        for name in ("preconditioner", "step_size", "beta1", "beta2", "eps", "eps_g", "min_step", "heavy_ball",
                     "bias_correction", "initial_accumulator", "mirror_map")
    }  # fmt: skip
    assert loop.identity["settings"]["compile"] is True
    with pytest.raises(ConfigurationError, match="`compile` was `True` and is `False`"):
        fit(FedDuAdagrad(), tmp_path, "last", max_rounds=3)
    server = FedDuAdagrad()
    loop, _ = fit(server, tmp_path, "last", max_rounds=3, compile=True)
    assert len(loop.history) == 3
    assert server._passes.compiled


class OwnStep(FedAvg):
    def step(self, weights, update):
        weights.add_(update.mean_delta.sign())
        return 1.0


class OwnHook(FedAvg):
    def on_aggregate_end(self, loop, update):
        loop.eta_g = 1.0


class Declared(OwnStep):
    mean_step = 1.0


class DeclaredByInstance(Returns):
    def __init__(self, eta_g):
        super().__init__(eta_g)
        self.mean_step = eta_g


def with_other_step():
    server = FedAvg()
    server.step = lambda weights, update: 1.0
    return server


@pytest.mark.parametrize(
    ("make", "mean_step"),
    [
        (FedAvg, 1.0),
        (lambda: FedAvg(0.5), 0.5),
        (lambda: FedAvg(1), 1.0),
        (lambda: FedDuAServer("identity", step_size=2.0), 2.0),
        (lambda: FedDuAServer("identity", step_size=1.0, mirror_map=PNorm(1.5)), None),
        (lambda: FedDuAServer("adagrad", step_size=1.0), None),
        (FedAvgM, None),
        (FedExP, None),
        (OwnStep, None),
        (OwnHook, None),
        (with_other_step, None),
        (lambda: Returns(1.0), None),
        (Declared, 1.0),
        (lambda: DeclaredByInstance(0.5), 0.5),
    ],
)
def test_which_rules_are_a_step_along_the_mean(make, mean_step):
    server = make()
    assert server.mean_step == mean_step
    assert server.averages is (mean_step == 1.0)


@pytest.mark.parametrize("client", [Scaffnew(), FedMid(0.1), FedDualAvg(0.1)], ids=lambda client: type(client).__name__)
def test_an_algorithm_that_needs_the_mean_does_not_take_a_rule_of_unknown_effect(client):
    mirror = FedDuAServer("identity", step_size=1.0, mirror_map=PNorm(1.5))
    for server in (OwnStep(), OwnHook(), Returns(1.0), mirror, FedAvgM(), FedExP()):
        with pytest.raises(ConfigurationError, match="averages the clients' weights|needs a constant server step"):
            FederatedLoop(server=server, client=client, local_steps=1)
    for server in (FedAvg(), Declared()):
        FederatedLoop(server=server, client=client, local_steps=1)


def test_a_step_of_its_own_needs_no_loop():
    weights = torch.zeros(2)
    assert Returns(0.5).step(weights, RoundUpdate(torch.ones(2), torch.ones(1))) == 0.5
    assert weights.tolist() == [1.0, 1.0]
