"""Whatever a module keeps, no client leaves it to the next: neither their order nor the number of ranks counts."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_feddua import ClientSampler, ConfigurationError, FedAvg, FedDuAdam, FederatedDataModule
from lightning_feddua.host.hidden.hidden_state import HiddenState
from tests.host.stateful_modules import KINDS, Stateful
from tests.modules import classification


class Both(ClientSampler):
    """Two clients, in one order or the other."""

    def __init__(self, backwards):
        self.backwards = backwards

    def size(self, population):
        return 2

    def sample(self, seed, round, population):
        return [1, 0] if self.backwards else [0, 1]


def trained(make_loop, make, number=4, **arguments):
    torch.manual_seed(0)
    model = make()
    data = FederatedDataModule({str(i): classification(20 + i, seed=i) for i in range(number)}, batch_size=8)
    make_loop(**{"server": FedDuAdam(), "max_rounds": 2, "local_steps": 3, **arguments}).fit(model, data)
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


# Every third kind in the fast tests; all of them in the slow ones.
_SOME = [name if i % 3 == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(KINDS)]


@pytest.mark.parametrize("name", _SOME)
def test_neither_order_nor_engine_nor_ranks_change_the_result(make_loop, name):
    make = KINDS[name]
    alone = trained(make_loop, make, engine="sequential")
    assert_same(trained(make_loop, make, engine="auto"), alone)
    assert_same(trained(make_loop, make, engine="auto", devices=2, strategy="ddp_fork"), alone)
    one = trained(make_loop, make, number=2, server=FedAvg(), sampler=Both(backwards=False), engine="sequential")
    other = trained(make_loop, make, number=2, server=FedAvg(), sampler=Both(backwards=True), engine="sequential")
    assert_same(one, other)


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"a_buffer_assigned"}))
def test_a_run_leaves_a_module_as_it_was_but_for_what_it_trains(make_loop, name):
    torch.manual_seed(0)
    model = KINDS[name]()
    state = HiddenState(model, lambda: [*model.parameters(), *(b for n, b in model.named_buffers() if n != "cache")])
    before = state.snapshot()
    data = FederatedDataModule({str(i): classification(20, seed=i) for i in range(3)}, batch_size=8)
    make_loop(engine="auto", max_rounds=1).fit(model, data)
    # But for private attributes of Lightning and torchmetrics, such as the device that they are on.
    assert [label for label in before.changes() if "._" not in label] == []


class MadeParameter(Stateful):
    def advance(self, x):
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(()))
        return self.scale.detach()


class MadeLayer(Stateful):
    def advance(self, x):
        if not hasattr(self, "late"):
            self.late = nn.Linear(4, 1)
        return self.late(x).mean().item()


class BufferOfNone(Stateful):
    def begin(self):
        self.register_buffer("mean", None)

    def advance(self, x):
        self.mean = x.mean(0) if self.mean is None else 0.5 * self.mean
        return self.mean.sum()


class GrowingBuffer(Stateful):
    def begin(self):
        self.register_buffer("queue", torch.zeros(1))

    def advance(self, x):
        self.queue = torch.cat([self.queue, x.mean().view(1)])
        return self.queue.sum()


class LateWrite(Stateful):
    """Nothing happens before the fourth client, and then only in memory."""

    def begin(self):
        self.mean = torch.zeros(2)

    def advance(self, x):
        if self.trainer.current_round >= 2:
            self.mean.data.add_(1)
        return self.mean.sum()


REFUSED = [
    (MadeParameter, r"local steps made, replaced or removed the parameter `scale`\. Make it in `__init__`"),
    (MadeLayer, r"local steps made or replaced the submodule `late`, which has `weight`\. Make it"),
    (BufferOfNone, r"The buffer `mean` has no value before a client's local steps, which give it one\. Make"),
    (GrowingBuffer, r"The buffer `queue` has shape \(1,\) at first and is of shape \(4,\) after a client's"),
    (LateWrite, r"A client has changed `self\.mean` in a way that shows only in its elements"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_undone_is_refused(make_loop, make, message):
    with pytest.raises(ConfigurationError, match=message):
        trained(make_loop, make, engine="sequential", max_rounds=4)


def test_one_rank_alone_finds_out_and_all_of_them_say_so(make_loop):
    with pytest.raises(Exception, match=r"made, replaced or removed the parameter `scale`"):
        trained(make_loop, MadeParameter, engine="sequential", devices=2, strategy="ddp_fork")


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = [1, {"a": np.arange(3)}, (torch.zeros(2), {3})]
        self.itself = [self]
        self.table = list(range(20_000))


def test_objects_stay_the_same_objects():
    module = Graph()
    state = HiddenState(module, lambda: [])
    state.take()
    items, inner, array, tensor, known = (
        module.items, module.items[1], module.items[1]["a"], module.items[2][0], module.items[2][1],
    )  # fmt: skip
    array += 1
    tensor.add_(1)
    known.add(4)
    inner["b"] = 1
    items.append(2)
    module.items = ["another"]
    module.new = 1
    assert state.changes() == ["self.items", "self.new", "self.items", "self.items[1]"] + [
        "self.items[2][1]", "self.items[1]['a']", "self.items[2][0]",
    ]  # fmt: skip
    state.restore()
    assert state.changes() == []
    assert module.items is items
    assert items[1] is inner
    assert items[1] == {"a": array}
    assert items[2][0] is tensor
    assert array.tolist() == [0, 1, 2]
    assert tensor.tolist() == [0, 0]
    assert known == {3}
    assert len(items) == 3


def test_further_objects_are_looked_after():
    class Helper:
        count = 0

    module, helper = nn.Linear(1, 1), Helper()
    state = HiddenState(module, module.parameters)
    state.watch(helper)
    state.take()
    helper.count += 1
    assert state.changes() == ["Helper.count"]
    state.restore()
    assert helper.count == 0
