"""Less common holders of state: what can be undone leaks to no client, and what cannot be is refused."""

import functools
import itertools
import weakref
from array import array

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_feddua import ConfigurationError, FedAvg, FederatedDataModule
from lightning_feddua.host.hidden.hidden_state import HiddenState
from tests.host.stateful_modules import Stateful
from tests.host.test_hidden_state import Both, assert_same, trained
from tests.modules import classification


class Scheduler(Stateful):
    def configure_optimizers(self):
        self.optimizer = super().configure_optimizers()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 0.5**epoch)
        return self.optimizer

    def advance(self, x):
        self.scheduler.step()
        return self.scheduler.last_epoch


class HelperOptimizer(Stateful):
    def begin(self):
        self.place = torch.zeros(1, requires_grad=True)
        self.helper = torch.optim.SGD([self.place], lr=1.0, momentum=0.9)

    def advance(self, x):
        # Gradients add up, and momentum does.
        (self.place.sum() * x.mean()).backward()
        self.helper.step()
        return self.place.item()


class Scaler(Stateful):
    def begin(self):
        self.scaler = torch.amp.GradScaler("cpu")

    def advance(self, x):
        self.scaler.scale(x.mean())
        self.scaler.update(new_scale=2 * self.scaler.get_scale())
        return self.scaler.get_scale() / 2**17


class Bytes(Stateful):
    def begin(self):
        self.bytes, self.array = bytearray(b"\1"), array("d", [1.0])

    def advance(self, x):
        self.bytes[0] += 1
        self.array.append(1.0)
        return self.bytes[0] + len(self.array)


class Closure(Stateful):
    def begin(self):
        total, seen = 0, []

        def count():
            nonlocal total
            total += 1
            seen.append(1)
            count.calls = getattr(count, "calls", 0) + 1
            return total + len(seen) + count.calls

        self.count = count

    def advance(self, x):
        return self.count()


class Partial(Stateful):
    def begin(self):
        self.partial = functools.partial(lambda *values, **named: [*values, *named.values()], [1], more=[2])

    def advance(self, x):
        for values in self.partial():
            values.append(1)
        return len(self.partial()[0]) + len(self.partial()[1])


class Order(Stateful):
    def begin(self):
        self.table = {"a": 1.0, "b": 2.0, "c": 3.0}

    def advance(self, x):
        name = next(iter(self.table))
        self.table[name] = value = self.table.pop(name)
        return value


class TrueToOne(Stateful):
    def begin(self):
        self.first, self.items = True, [0]

    def advance(self, x):
        result = (self.first is True) + 2 * (type(self.items[0]) is int)
        self.first, self.items[0] = 1, 0.0
        return result


class Window(Stateful):
    def begin(self):
        self.window = memoryview(bytearray(2))

    def advance(self, x):
        self.window[0] += 1
        return self.window[0]


class WeakKeys(Stateful):
    def begin(self):
        self.calls = weakref.WeakKeyDictionary()

    def advance(self, x):
        self.calls[self.net] = self.calls.get(self.net, 0) + 1
        return self.calls[self.net]


class Helper:
    total = 0


class ClassOfHelper(Stateful):
    def begin(self):
        self.helper = Helper()

    def advance(self, x):
        Helper.total += 1
        return self.helper.total


HOLDERS = [
    Scheduler,
    HelperOptimizer,
    Scaler,
    Bytes,
    Closure,
    Partial,
    Order,
    TrueToOne,
    Window,
    WeakKeys,
    ClassOfHelper,
]


@pytest.mark.parametrize("make", HOLDERS)
def test_the_order_of_clients_does_not_count(make_loop, make):
    arguments = {"number": 2, "server": FedAvg(), "engine": "sequential"}
    one = trained(make_loop, make, sampler=Both(backwards=False), **arguments)
    other = trained(make_loop, make, sampler=Both(backwards=True), **arguments)
    assert_same(one, other)
    assert_same(one, trained(make_loop, make, sampler=Both(backwards=False), **{**arguments, "engine": "auto"}))


class Kept(Stateful):
    """Keeps the loop's own optimizer and scheduler, as many modules do."""

    def configure_optimizers(self):
        self.opt = torch.optim.Adam(self.net.parameters(), 0.1)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 1, 0.5)
        return {"optimizer": self.opt, "lr_scheduler": {"scheduler": self.sched, "interval": "step"}}

    def advance(self, x):
        return 0.0


class NotKept(Kept):
    def configure_optimizers(self):
        configured = super().configure_optimizers()
        del self.opt, self.sched
        return configured


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_optimizers_of_the_run_may_be_kept(make_loop, engine):
    assert_same(trained(make_loop, Kept, engine=engine), trained(make_loop, NotKept, engine=engine))


def endless():
    while True:
        yield from (1.0, 0.5)


ITERATORS = {
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([1.0, 0.5, 0.25]),
    "cycle of one": lambda: itertools.cycle([1.0]),
    "list": lambda: iter([0.5] * 1000),
    "zip": lambda: map(min, zip(itertools.count(), [0.5] * 1000)),  # noqa: B905
    "expression": lambda: (1 / (k + 1) for k in range(10**6)),
    "function": endless,
    "loader": lambda: iter(DataLoader(torch.rand(1000))),
    "sentinel": lambda: iter(lambda: 1.0, None),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_iterators_that_clients_advance_are_refused(make_loop, kind):
    class Reads(Stateful):
        def begin(self):
            self.source = [ITERATORS[kind]()]

        def advance(self, x):
            return float(next(self.source[0]))

    with pytest.raises(ConfigurationError, match=r"keeps the iterator `self\.source\[0\]`.*\. Make it in `on_train_"):
        trained(make_loop, Reads, engine="auto")


def test_iterators_that_nobody_advances_or_that_clients_make_are_fine(make_loop):
    class Makes(Stateful):
        def begin(self):
            self.ended = (k for k in ())
            next(self.ended, None)
            self.idle = [itertools.count(), self.parameters(), zip([1], [2]), iter({1: 2})]  # noqa: B905

        def on_train_start(self):
            self.source = itertools.cycle([1.0, 0.5])

        def advance(self, x):
            return next(self.source)

    arguments = {"number": 2, "server": FedAvg(), "engine": "sequential"}
    one = trained(make_loop, Makes, sampler=Both(backwards=False), **arguments)
    assert_same(one, trained(make_loop, Makes, sampler=Both(backwards=True), **arguments))


def test_what_validation_reads_from_an_iterator_is_its_own_matter(make_loop):
    class Validates(Stateful):
        def begin(self):
            self.numbers = itertools.count()

        def advance(self, x):
            return 0.0

        def validation_step(self, batch, batch_idx):
            self.log("n", float(next(self.numbers)))

    data = FederatedDataModule({"a": classification(20)}, classification(8), batch_size=8)
    model = Validates()
    make_loop(max_rounds=3, num_sanity_val_steps=0).fit(model, data)
    assert next(model.numbers) >= 3


def test_a_helper_is_restored_in_place():
    module = nn.Module()
    tensor = torch.zeros(1, requires_grad=True)
    module.helper = torch.optim.Adam([tensor], 0.1)
    state = HiddenState(module, lambda: [])
    state.take()
    tensor.sum().backward()
    module.helper.step()
    assert "self.helper.state" in state.changes()
    state.restore()
    assert state.changes() == []
    assert tensor.item() == 0
    assert tensor.grad is None
    assert len(module.helper.state) == 0
