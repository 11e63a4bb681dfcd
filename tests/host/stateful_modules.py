"""Modules whose training step depends on something that they keep besides parameters and buffers."""

import random
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from lightning import LightningModule
from torch import nn
from torchmetrics import MeanMetric, SumMetric


class Stateful(LightningModule):
    """A loss that is multiplied by what :meth:`advance` makes of the module's own state."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.begin()

    def begin(self):
        pass

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y) * (1 + 0.1 * float(self.advance(x)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1)


@dataclass
class Plain:
    count: int = 0
    seen: list = field(default_factory=list)


class Slotted:
    __slots__ = ("count", "seen")

    def __init__(self):
        self.count = 0


class WithClassAttribute(Stateful):
    total = 0
    memory = {"n": 0}  # noqa: RUF012

    def advance(self, x):
        type(self).total += 1
        self.memory["n"] += 1
        return self.total + self.memory["n"]


KINDS = {}


def kind(begin):
    """Register a kind of state by a function that makes it, and is called with the module in each step afterwards."""

    def register(advance):
        def made(self, begin=begin):
            begin(self)

        KINDS[advance.__name__] = type(advance.__name__, (Stateful,), {"begin": made, "advance": advance})
        return advance

    return register


KINDS["class_attribute"] = WithClassAttribute


@kind(lambda self: setattr(self, "count", 0))
def counter(self, x):
    self.count += 1
    return self.count


@kind(lambda self: None)
def made_in_the_first_step(self, x):
    self.count = getattr(self, "count", 0) + 1
    return self.count


@kind(lambda self: setattr(self, "mean", torch.zeros(4)))
def tensor_in_place(self, x):
    self.mean.lerp_(x.mean(0), 0.5)
    return self.mean.sum()


@kind(lambda self: setattr(self, "mean", torch.zeros(4)))
def tensor_assigned(self, x):
    self.mean = 0.5 * self.mean + x.mean(0)
    return self.mean.sum()


@kind(lambda self: setattr(self, "mean", torch.zeros(4)))
def tensor_through_data(self, x):
    self.mean.data.lerp_(x.mean(0), 0.5)
    return self.mean.sum()


@kind(lambda self: setattr(self, "seen", []))
def growing_list(self, x):
    self.seen.append(x.mean())
    return sum(self.seen)


@kind(lambda self: setattr(self, "nested", {"a": [deque([0.0], maxlen=3), (Counter(), defaultdict(list))]}))
def nested_containers(self, x):
    recent, (counts, lists) = self.nested["a"]
    recent.append(x.mean().item())
    counts[len(x)] += 1
    lists["n"].append(1)
    return sum(recent) + sum(counts.values()) + len(lists["n"])


@kind(lambda self: setattr(self, "order", OrderedDict(a=1.0, b=2.0, c=3.0)))
def order_of_a_dict(self, x):
    self.order.move_to_end(next(iter(self.order)))
    return next(iter(self.order.values()))


@kind(lambda self: setattr(self, "known", {0}))
def a_set(self, x):
    self.known.add(max(self.known) + 1)
    return len(self.known)


@kind(lambda self: setattr(self, "array", np.zeros(3)))
def numpy_array(self, x):
    self.array += x.mean().item()
    return self.array.sum()


@kind(lambda self: setattr(self, "array", np.zeros(10_000)))
def large_numpy_array(self, x):
    self.array[:] += x.mean().item()
    return self.array[0]


@kind(lambda self: setattr(self, "table", [0.0] * 5000))
def long_list_of_the_same_length(self, x):
    self.table[4000] += 1
    return self.table[4000]


@kind(lambda self: setattr(self, "rng", torch.Generator().manual_seed(1)))
def torch_generator(self, x):
    return torch.rand((), generator=self.rng)


@kind(lambda self: setattr(self, "rng", np.random.default_rng(1)))
def numpy_generator(self, x):
    return self.rng.random()


@kind(lambda self: setattr(self, "rng", np.random.RandomState(1)))
def numpy_random_state(self, x):
    return self.rng.rand()


@kind(lambda self: setattr(self, "rng", random.Random(1)))
def python_generator(self, x):
    return self.rng.random()


@kind(lambda self: setattr(self, "plain", Plain()))
def plain_object(self, x):
    self.plain.count += 1
    self.plain.seen.append(1)
    return self.plain.count + len(self.plain.seen)


@kind(lambda self: setattr(self, "space", SimpleNamespace(counts=UserDict(n=0))))
def namespace(self, x):
    self.space.counts["n"] += 1
    self.space.last = self.space.counts["n"]
    return self.space.last


@kind(lambda self: setattr(self, "step", Plain().seen.append))
def bound_method(self, x):
    self.step(1)
    return len(self.step.__self__)


@kind(lambda self: setattr(self, "slotted", [Slotted()]))
def object_with_slots(self, x):
    self.slotted[0].count += 1
    self.slotted[0].seen = 1
    return self.slotted[0].count


@kind(lambda self: setattr(self, "metric", MeanMetric()))
def metric_never_logged(self, x):
    self.metric.update(x.mean())
    return self.metric.compute()


@kind(
    lambda self: [
        setattr(self, "a", SumMetric()),
        setattr(self, "b", MeanMetric()),
        setattr(self, "ab", self.a + self.b),
    ]
)
def composed_metric(self, x):
    self.ab.update(x.mean())
    return self.ab.compute()


@kind(lambda self: setattr(self, "others", [nn.BatchNorm1d(4)]))
def module_in_a_list(self, x):
    self.others[0](x)
    return self.others[0].running_mean.sum()


@kind(lambda self: None)
def frozen_halfway(self, x):
    frozen = not self.net[0].weight.requires_grad
    self.net[0].weight.requires_grad_(False)
    return 2.0 * frozen


@kind(lambda self: None)
def hook(self, x):
    self.net[1].register_forward_hook(lambda module, args, output: output * 0.9)
    return 1.0


@kind(lambda self: None)
def training_flag(self, x):
    was_training = self.net.training
    self.net.eval()
    return float(was_training)


@kind(lambda self: None)
def submodule_without_tensors(self, x):
    if not hasattr(self, "late"):
        self.late = nn.Dropout(0.5)
        return 1.0
    return 2.0


@kind(lambda self: self.register_buffer("cache", None, persistent=False))
def cache_that_is_none(self, x):
    self.cache = x.mean(0) if self.cache is None else self.cache + 1
    return self.cache.sum()


@kind(lambda self: self.register_buffer("cache", torch.zeros(1), persistent=False))
def growing_cache(self, x):
    self.cache = torch.cat([self.cache, x.mean().view(1)])
    return self.cache.sum()


@kind(lambda self: self.register_buffer("seen", torch.zeros(2)))
def a_buffer_assigned(self, x):
    self.seen = self.seen + x.mean()
    return self.seen.sum()


@kind(lambda self: None)
def global_generators(self, x):
    return random.random() + np.random.rand() + torch.rand(())
