"""Many small tensors and arrays, and large ones, cost little; what happens to them is seen all the same."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from lightning_feddua import ConfigurationError, FedAvg
from lightning_feddua.host.hidden.hidden_state import HiddenState
from lightning_feddua.host.hidden.snapshot import Snapshot
from lightning_feddua.host.hidden.tensor_groups import Group
from lightning_feddua.host.hidden.tensors import ArrayContent, TensorContent
from tests.host.stateful_modules import Stateful
from tests.host.test_hidden_state import Both, assert_same, trained


class Replay(Stateful):
    """Clients write to what is kept, and append to it."""

    number = 400

    def begin(self):
        self.tensors = [torch.full((3,), float(i)) for i in range(self.number)]
        self.arrays = [(np.full((2, 2), float(i)), i) for i in range(self.number)]

    def advance(self, x):
        self.tensors[7] += x.mean()
        self.tensors[8].data.add_(1)
        self.arrays[9][0][1] += 1
        self.tensors.append(x[0])
        return (self.tensors[7] + self.tensors[8]).sum() / 10 + self.arrays[9][0].sum() / 10 + len(self.tensors)


class LargeReplay(Replay):
    number = 11_000


@pytest.mark.parametrize("make", [Replay, LargeReplay])
def test_what_clients_do_to_many_is_undone(make_loop, make):
    arguments = {"number": 2, "server": FedAvg(), "engine": "sequential"}
    one = trained(make_loop, make, sampler=Both(backwards=False), **arguments)
    assert_same(one, trained(make_loop, make, sampler=Both(backwards=True), **arguments))


class LateWrite(LargeReplay):
    def advance(self, x):
        if self.trainer.current_round >= 2:
            self.tensors[7] += 1
        return self.tensors[7].sum()


def test_late_writes_to_very_many_are_refused(make_loop):
    with pytest.raises(ConfigurationError, match=r"A client has changed `self\.tensors\[7\]` in a way that shows only"):
        trained(make_loop, LateWrite, engine="sequential", max_rounds=4)


def kept(**attributes):
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_all_of_many_are_known_by_name():
    module = kept(tensors=[torch.zeros(2) for _ in range(300)], arrays=[np.zeros(2) for _ in range(300)])
    state = HiddenState(module, lambda: [])
    state.take()
    module.tensors[3].fill_(torch.nan)
    module.tensors[4].data = torch.ones(5)
    module.arrays[5][:] = 1
    assert state.changes() == ["self.tensors[3]", "self.tensors[4]", "self.arrays[5]"]
    assert len(list(state.snapshot().tensors())) == 300
    state.restore()
    assert state.changes() == []
    assert not torch.stack(module.tensors).any()
    assert not np.stack(module.arrays).any()


def test_what_is_kept_over_rounds_takes_no_new_snapshot():
    module = kept(best=0.0, tensors=[torch.zeros(2) for _ in range(300)], large=torch.zeros(5000), scores={"a": 1})
    state = HiddenState(module, lambda: [])
    state.take()
    first = state.present()
    module.best, module.scores["b"], module.new = 1.0, 2, None
    module.large += 1
    module.tensors[0] += 1
    state.take()
    assert state.present() is first
    module.best, module.scores["a"] = 2.0, True
    module.large += 1
    module.tensors[0] += 1
    state.restore()
    assert (module.best, module.scores, module.new) == (1.0, {"a": 1, "b": 2}, None)
    assert type(module.scores["a"]) is int
    assert module.large[0] == module.tensors[0][0] == 1
    module.large = torch.ones(1)
    state.take()
    assert state.present() is not first


def test_a_snapshot_that_is_to_come_back_is_not_renewed():
    module = kept(count=0)
    state = HiddenState(module, lambda: [])
    with state.undone():
        module.count = 1
        state.take()
    assert module.count == 0


def test_copies_are_used_again_and_not_kept_alive():
    module = kept(array=np.zeros(5000), tensor=torch.zeros(5000), arrays=[np.zeros(3) for _ in range(300)])
    first = Snapshot({"self": module})
    second = Snapshot({"self": module}, before=first)
    saved = [part.saved for part in second.parts if isinstance(part, Group | ArrayContent)]
    known = [part.saved for part in first.parts if isinstance(part, Group | ArrayContent)]
    assert len(saved) == 2
    assert all(one is other for one, other in zip(saved, known, strict=True))
    gone = weakref.ref(first)
    del first, known
    gc.collect()
    assert gone() is None


def test_everything_is_compared_once_at_the_end_of_a_round(monkeypatch):
    compared = []
    same = TensorContent.same
    monkeypatch.setattr(TensorContent, "same", lambda part: compared.append(1) or same(part))
    module = kept(large=torch.zeros(5000))
    state = HiddenState(module, lambda: [])
    counts = []
    for _ in range(4):
        compared.clear()
        state.take()
        for _ in range(3):
            state.restore()
            state.check()
        state.check(deep=True)
        state.restore(deep=True)
        counts.append(len(compared))
    # As the state is taken, and at the end; before each of the first four clients besides.
    assert counts == [4, 3, 2, 2]
