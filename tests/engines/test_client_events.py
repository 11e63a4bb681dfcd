"""What the module holds when a client starts and ends, on every engine, and who is told."""

import pytest
import torch
from torch.utils.data import Dataset

from lightning_feddua import FedAvg, FederatedCallback, FederatedDataModule
from tests.modules import Classifier, classification

ENGINES = ["sequential", "vectorized"]
# Two groups of clients for the vectorized engine.
SIZES = (30, 60, 45, 7)


class Recorder(FederatedCallback):
    """What the module holds at each event, in float64."""

    def __init__(self):
        self.events = []

    def record(self, event, loop, client_id):
        self.events.append((event, client_id, {n: t.clone() for n, t in loop.module.state_dict().items()}))

    def on_client_start(self, loop, client_id):
        self.record("start", loop, client_id)

    def on_client_end(self, loop, client_id):
        self.record("end", loop, client_id)

    def on_round_start(self, loop):
        self.record("round", loop, "")

    def names(self, event):
        return [client for kind, client, _ in self.events if kind == event]


def fit(make_loop, data, **arguments):
    torch.manual_seed(0)
    recorder = Recorder()
    model = Classifier(dropout=0.0)
    loop = make_loop(callbacks=recorder, precision="64-true", server=FedAvg(), max_rounds=2, **arguments)
    loop.fit(model, FederatedDataModule(data, batch_size=20))
    return recorder, model


def clients():
    return {str(i): classification(size, seed=i) for i, size in enumerate(SIZES)}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_module_holds_the_global_model_at_the_start_and_the_clients_own_at_the_end(make_loop, engine):
    recorder, model = fit(make_loop, clients(), engine=engine)
    ends = []
    for event, _, state in recorder.events:
        if event == "round":
            start, ends = state, []
        elif event == "start":
            assert all(torch.equal(state[name], start[name]) for name in start)
        else:
            ends.append(state)
            # Of each client its own: weights, running statistics and the counter of batches.
            assert state["net.1.num_batches_tracked"] == start["net.1.num_batches_tracked"] + 4
            assert all(not torch.equal(state["net.4.weight"], other["net.4.weight"]) for other in ends[:-1])
    assert len(ends) == len(SIZES)
    # The new global model is their mean.
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, torch.stack([end[name] for end in ends]).mean(0), rtol=1e-12, atol=1e-14)


def test_both_engines_show_the_same_clients(make_loop):
    sequential, _ = fit(make_loop, clients(), engine="sequential")
    vectorized, _ = fit(make_loop, clients(), engine="vectorized")
    ends = [{(i, c): s for i, (e, c, s) in enumerate(r.events) if e == "end"} for r in (sequential, vectorized)]
    ends = [sorted(((c, s) for (_, c), s in end.items()), key=lambda pair: pair[0]) for end in ends]
    assert len(ends[0]) == 2 * len(SIZES)
    for (client, a), (other, b) in zip(*ends, strict=True):
        assert client == other
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-10, atol=1e-12)


class Unreliable(Dataset):
    """A dataset that cannot be read in one round, where asked for; else as it is."""

    def __init__(self, dataset, fails):
        self.dataset, self.fails, self.reads = dataset, fails, 0

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        self.reads += 1
        # Beyond a trial of two clients, whose steps are few.
        if self.fails and self.reads > 100:
            raise OSError("broken disk")
        return self.dataset[index]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_clients_retrained_one_by_one_start_once_and_end_once(make_loop):
    data = {str(i): Unreliable(classification(40, seed=i), fails=i == 1) for i in range(4)}
    recorder, _ = fit(make_loop, data, engine="vectorized", on_client_error="skip")
    starts, ends = recorder.names("start"), recorder.names("end")
    assert sorted(starts) == sorted("0123" * 2)
    # The disk breaks in one of the rounds; then the stack fails, and all clients but one are trained all the same.
    assert sorted(ends) == sorted(["0", "2", "3"] * 2 + ["1"] * ends.count("1"))
    assert ends.count("1") < 2
    round_start = None
    for event, _, state in recorder.events:
        round_start = state if event == "round" else round_start
        if event == "end":
            assert not torch.equal(state["net.4.weight"], round_start["net.4.weight"])
            assert state["net.1.num_batches_tracked"] == round_start["net.1.num_batches_tracked"] + 4


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_listener_the_module_is_left_alone(make_loop, engine, monkeypatch):
    """No copy that nobody looks at."""
    shown = []
    monkeypatch.setattr("lightning_feddua.engines.stack.ClientStack.show", lambda *args: shown.append(args))
    make_loop(engine=engine, max_rounds=1).fit(Classifier(dropout=0.0), FederatedDataModule(clients(), batch_size=20))
    assert shown == []


def test_auto_may_vectorize_where_a_callback_looks_at_clients(make_loop):
    data = {str(i): classification(20, seed=i) for i in range(20)}
    torch.manual_seed(0)
    loop = make_loop(engine="auto", callbacks=Recorder(), max_rounds=1)
    loop.fit(Classifier(dropout=0.0), FederatedDataModule(data, batch_size=20))
    assert "times" in loop.engine_note
