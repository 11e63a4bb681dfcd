"""Modules with several kinds of hidden state at once: a client's weights are its own, whoever was trained before it."""

import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_feddua import ClientSampler, FedAvg, FedDuAdam, FederatedCallback, FederatedDataModule, FederatedLoop
from tests.host.stateful_modules import KINDS, Stateful
from tests.modules import classification

CLIENTS = 4


class Several(Stateful):
    """Has a module of each kind inside, in lists and dictionaries."""

    def __init__(self, kinds):
        self.kinds = kinds
        super().__init__()

    def begin(self):
        self.parts = nn.ModuleList([KINDS[name]() for name in self.kinds])

    def advance(self, x):
        # The outputs tell of hooks, flags and buffers, too.
        return sum(float(part.advance(x)) + float(part.net(x).mean()) for part in self.parts) % 3


class Ordered(ClientSampler):
    def __init__(self, order):
        self.order = order

    def size(self, population):
        return len(self.order)

    def sample(self, seed, round, population):
        return self.order


class Weights(FederatedCallback):
    """Of each client of the first round."""

    def __init__(self):
        self.of = {}

    def on_client_end(self, loop, round, client_id):
        if round == 0:
            self.of[client_id] = [p.detach().clone() for p in loop.module.net.parameters()]


def run(kinds, order=(0, 1, 2, 3), **arguments):
    torch.manual_seed(0)
    model, weights = Several(kinds), Weights()
    data = FederatedDataModule({str(i): classification(20 + i, seed=i) for i in range(CLIENTS)}, batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        defaults = {"server": FedAvg(), "max_rounds": 1, "local_steps": 3, "engine": "sequential", "accelerator": "cpu"}
        FederatedLoop(
            **{**defaults, **arguments},
            sampler=Ordered(order),
            out_dir=folder,
            enable_progress_bar=False,
            enable_checkpointing=False,
            callbacks=weights,
        ).fit(model, data)
    return model.state_dict(), weights.of


kinds = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4, unique=True)


def check_order(names, order):
    expected, found = run(names)[1], run(names, order)[1]
    assert found.keys() == expected.keys()
    for client, weights in expected.items():
        assert all(map(torch.equal, found[client], weights)), client


def check_ranks(names, ranks, engine):
    arguments = {"server": FedDuAdam(), "max_rounds": 2}
    expected = run(names, **arguments)[0]
    found = run(names, **arguments, engine=engine, devices=ranks, strategy="ddp_fork")[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@settings(max_examples=6, deadline=None)
@given(names=kinds, order=st.permutations(range(CLIENTS)))
def test_the_order_of_clients_does_not_count(names, order):
    check_order(names, order)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(names=kinds, order=st.permutations(range(CLIENTS)))
def test_the_order_of_clients_never_counts(names, order):
    check_order(names, order)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(names=kinds, ranks=st.integers(2, 3), engine=st.sampled_from(["auto", "sequential"]))
def test_the_number_of_ranks_never_counts(names, ranks, engine):
    check_ranks(names, ranks, engine)
