"""Numbers that clients send: the algorithm's side, on the documentation's own example."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_feddua import FedAvg, FedDuAdagrad, FederatedLoop, LocalRound, LocalTraining, RoundUpdate
from tests.clients.client_oracle import LeastSquares

PAGE = (Path(__file__).parents[2] / "docs/client_algorithm.md").read_text()


def fed_nova():
    scope = {"LocalTraining": LocalTraining}
    exec(re.search(r"```python\n(class FedNova.*?)```", PAGE, re.DOTALL)[1], scope)
    return scope["FedNova"]()


def test_fednova_agrees_with_numpy():
    problem, lr, eta_g, taus = LeastSquares.random(clients=3), 0.05, 0.8, [2, 5, 9]
    client, server, weights = fed_nova(), FedAvg(eta_g), torch.zeros(problem.dim, dtype=torch.float64)
    w = np.zeros(problem.dim)
    for _ in range(5):
        ends, deltas, sent = [], [], []
        for i, tau in enumerate(taus):
            x = w.copy()
            for _ in range(tau):
                x = x - lr * problem.gradient(i, x)
            ends.append(x - w)
            local = LocalRound(weights, lr, step=tau)
            deltas.append(torch.from_numpy(ends[-1].copy()))
            assert client.finish(deltas[-1], local) == {}
            sent.append(local.scalars["tau"])
        w = w + eta_g * np.mean(taus) * np.mean([end / tau for end, tau in zip(ends, taus, strict=True)], axis=0)
        deltas = torch.stack(deltas)
        scalars = {"tau": torch.tensor(sent, dtype=torch.float64)}
        update = RoundUpdate(deltas.mean(0), deltas.square().sum(1), scalars=scalars)
        client.aggregate(weights, update, server.step(weights, update))
        np.testing.assert_allclose(weights.numpy(), w, rtol=1e-12)


def test_a_stack_has_the_same_code():
    client, local = fed_nova(), LocalRound(torch.zeros(3), 0.1, step=4)
    deltas = torch.ones(2, 3)
    client.finish(deltas, local)
    assert (deltas == 0.25).all()
    assert local.scalars == {"tau": 4.0}


def test_the_step_must_be_known():
    with pytest.raises(ValueError, match="steps along the mean"):
        FederatedLoop(server=FedDuAdagrad(), client=fed_nova(), local_epochs=1)


def test_numbers_cost_a_client_nothing_worth_counting():
    assert fed_nova().vectors_sent == 1
    assert not fed_nova().extra_client_cost
