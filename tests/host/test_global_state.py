"""What a module's code keeps outside of the module: in global variables, in other classes, in functions."""

import random

import numpy as np
import pytest
import torch

from lightning_feddua import FedAvg
from lightning_feddua.host.hidden.hidden_state import HiddenState
from tests.forked_ranks import ForkedRanks
from tests.host.stateful_modules import Stateful
from tests.host.test_hidden_state import Both, assert_same, trained

COUNT = 0
LOG = []
TENSOR = torch.zeros(2)
GENERATOR = torch.Generator().manual_seed(3)
NUMPY = np.random.default_rng(3)
PYTHON = random.Random(3)


class Helper:
    calls = 0
    seen = []

    def note(self):
        Helper.calls += 1
        self.seen.append(Helper.calls)
        return len(self.seen) + self.calls


def rebound(self, x):
    global COUNT
    COUNT += 1
    return COUNT


def tensor(self, x):
    TENSOR.add_(x.mean())
    return TENSOR.sum()


def torch_generator(self, x):
    return torch.rand((), generator=GENERATOR)


def numpy_generator(self, x):
    return NUMPY.random()


def python_generator(self, x):
    return PYTHON.random()


def class_of_another(self, x):
    return Helper().note()


def of_a_function(self, x):
    of_a_function.calls = getattr(of_a_function, "calls", 0) + 1
    return of_a_function.calls


def through_other_functions(self, x):
    return [rebound(self, x) for _ in range(2)][-1] + (lambda: of_a_function(self, x))()


KINDS = [rebound, tensor, torch_generator, numpy_generator, python_generator, class_of_another, of_a_function]
KINDS += [through_other_functions]


def made(kind):
    return type(kind.__name__, (Stateful,), {"advance": kind})


@pytest.fixture(autouse=True)
def as_at_first():
    state = HiddenState(torch.nn.Identity(), lambda: [])
    state.watch(*(made(kind)() for kind in KINDS))
    state.take()
    yield
    state.restore(deep=True)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_order_of_clients_does_not_count(make_loop, kind):
    arguments = {"number": 2, "server": FedAvg(), "engine": "sequential"}
    one = trained(make_loop, made(kind), sampler=Both(backwards=False), **arguments)
    assert_same(one, trained(make_loop, made(kind), sampler=Both(backwards=True), **arguments))


@pytest.mark.slow
def test_nor_does_the_number_of_ranks(make_loop, tmp_path):
    def run(folder):
        for kind in KINDS:
            torch.save(trained(make_loop, made(kind), engine="auto"), folder / f"{kind.__name__}.pt")

    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        ranks = ForkedRanks(lambda folder=folder: run(folder), world_size, folder)
        assert ranks.wait(60) == [0] * world_size, ranks.output(0)
    for kind in KINDS:
        one, two = (torch.load(tmp_path / n / f"{kind.__name__}.pt", weights_only=True) for n in ("1", "2"))
        assert_same(one, two)


def logged(self, x):
    LOG.append(float(x.mean()))
    return 0.0


def test_what_is_written_into_a_list_can_be_read(make_loop):
    LOG.clear()
    trained(make_loop, made(logged), engine="sequential")
    assert len(LOG) > 0


def test_what_only_others_name_is_left_alone():
    state = HiddenState(made(tensor)(), lambda: [])
    state.take()
    before = TENSOR.clone()
    TENSOR.add_(1)
    of_a_function.calls = 7
    assert state.changes() == [f"{__name__}.TENSOR"]
    state.restore()
    assert torch.equal(TENSOR, before)
    assert of_a_function.calls == 7
