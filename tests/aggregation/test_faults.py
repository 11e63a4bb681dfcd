"""Clients that fail and are left out: by an exception, by an update that is not finite, in any stage."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_feddua import (
    FedAvg,
    FedDuAdam,
    FederatedCallback,
    FederatedDataModule,
    Scaffold,
)
from lightning_feddua.clients import Mime
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.models import LinearRegression
from tests.aggregation.bad_clients import (
    BAD_CLIENTS,
    Broken,
    Picky,
    assert_same,
    data,
    fit,
    five_columns,
    regression,
    rows,
)
from tests.modules import classification


@pytest.mark.parametrize("bad", BAD_CLIENTS)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_with_a_bad_client_is_the_run_without_it(make_skipping_loop, tmp_path, bad, devices):
    arguments = {"server": FedDuAdam(), "client_weights": "samples", "engine": "sequential"}
    good = make_skipping_loop(**arguments, out_dir=tmp_path / "good")
    expected = fit(good, data())
    make, message = BAD_CLIENTS[bad]
    if devices == 1:
        loop = make_skipping_loop(**arguments)
        with pytest.warns(UserWarning, match="bad") as noted:
            model = fit(loop, data(make()))
        messages = [str(warning.message) for warning in noted if "is left out" in str(warning.message)]
        assert len(messages) == 3
        assert all(
            f"Client `bad` is left out of round {i}, having failed during {message}" in messages[i] for i in (0, 1, 2)
        )
    else:
        loop = make_skipping_loop(**arguments, devices=2, strategy="ddp_fork")
        model = fit(loop, data(make()))
    assert_same(model, expected)
    assert rows(loop) == rows(good)
    assert [row["skipped_clients"] for row in loop.history] == [1, 1, 1]
    assert [row["skipped_clients"] for row in good.history] == [0, 0, 0]
    assert "skipped_clients" in (loop.run_dir / "metrics.csv").read_text().splitlines()[0]


@pytest.mark.parametrize("bad", BAD_CLIENTS)
def test_vectorized_clients_are_trained_one_by_one_where_a_stack_fails(make_skipping_loop, tmp_path, bad):
    arguments = {"server": FedAvg(), "client_weights": "samples", "precision": "64-true"}
    model = lambda: Picky(dropout=0.0).double()  # noqa: E731
    good = make_skipping_loop(**arguments, out_dir=tmp_path / "good", engine="sequential")
    expected = fit(good, data(), model)
    loop = make_skipping_loop(**arguments, engine="vectorized")
    with pytest.warns(UserWarning, match="`bad` is left out") as noted:
        found = fit(loop, data(BAD_CLIENTS[bad][0]()), model)
    stacks = [str(w.message) for w in noted if "trained one by one" in str(w.message)]
    # What is not finite stays in its own row of the stack.
    assert len(stacks) == (0 if bad in ("nan", "inf") else 3)
    assert all("the vectorized steps of 4 clients failed with" in message for message in stacks)
    for a, b in zip(found.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert [row["skipped_clients"] for row in loop.history] == [1, 1, 1]


class Listed(Dataset):
    """Samples that are not known to be in memory."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        return self._dataset[index]


@pytest.mark.filterwarnings("ignore:Client")
def test_what_workers_have_prepared_of_a_bad_client_does_not_reach_the_next(make_skipping_loop, tmp_path):
    clients = {name: Listed(classification(20 + i, seed=i)) for i, name in enumerate("abc")}
    clients = {"a": clients["a"], "bad": Broken(clients["a"]), "b": clients["b"], "c": clients["c"]}
    models = []
    for workers in (0, 1):
        loop = make_skipping_loop(max_rounds=2, engine="sequential", lanes=None)
        models.append(fit(loop, FederatedDataModule(clients, batch_size=8, num_workers=workers)))
        assert [row["skipped_clients"] for row in loop.history] == [1, 1]
    assert_same(*models)


class FailsInRounds(LinearRegression):
    """Fails in some rounds, for clients of which it knows the number of samples."""

    def __init__(self, rounds, sizes=(3, 4, 5, 6), dim=10):
        super().__init__(dim=dim, lr=0.05)
        self.rounds, self.sizes = rounds, sizes

    def training_step(self, batch, batch_idx):
        if self.trainer.current_round in self.rounds and len(batch[0]) in self.sizes:
            raise RuntimeError("not today")
        return super().training_step(batch, batch_idx)


class Mended(FailsInRounds):
    training_step = LinearRegression.training_step


class Record(FederatedCallback):
    """Copies of everything that a round changes."""

    def __init__(self):
        self.rounds, self.updates = [], []

    def on_aggregate_end(self, update):
        self.updates.append((update.mean_delta.numpy().copy(), update.squared_norms.numpy().copy()))

    def on_round_end(self, loop):
        states = [loop.states.get(client).clone() for client in range(4)]
        vectors = {name: vector.clone() for name, vector in loop.client.vectors.items()}
        server = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in loop.server.state_dict().items()}
        self.rounds.append((loop.weights.clone(), states, vectors, server))


@pytest.mark.filterwarnings("ignore:Client")
def test_a_client_that_fails_keeps_its_control_variate(make_skipping_loop):
    record = Record()
    loop = make_skipping_loop(client=Scaffold(), precision="64-true", callbacks=record)
    loop.fit(FailsInRounds(rounds=(1,), sizes=(4,)), regression())
    (_, before, _, _), (_, after, vectors, _) = record.rounds[:2]
    assert torch.equal(before[1], after[1])
    assert all(before[i].norm() > 0 and not torch.equal(before[i], after[i]) for i in (0, 2, 3))
    # c is the mean of all c_i, which holds only where the server hears of exactly the changes that clients keep.
    torch.testing.assert_close(vectors["c"], torch.stack(after).mean(dim=0)[0], rtol=1e-12, atol=1e-15)


@pytest.mark.filterwarnings("ignore:Client")
def test_a_round_without_clients_changes_nothing_and_three_in_a_row_end_the_run(make_skipping_loop):
    record = Record()
    loop = make_skipping_loop(
        max_rounds=9, server=FedDuAdam(), precision="64-true", callbacks=record, checkpoint_every=1
    )
    with pytest.raises(RuntimeError, match=r"All clients have failed in 3 rounds in a row, the last in round 7\. The"):
        loop.fit(FailsInRounds(rounds=(2, 5, 6, 7)), regression())
    for (weights, _, _, server), (same_weights, _, _, same_server) in [record.rounds[1:3], record.rounds[6:8]]:
        assert torch.equal(weights, same_weights)
        assert server.keys() == same_server.keys()
        assert all(np.array_equal(server[key], same_server[key]) for key in server)
    assert not torch.equal(record.rounds[2][0], record.rounds[3][0])
    assert [row["clients"] for row in loop.history] == [4, 4, 0, 4, 4, 0, 0, 0]
    assert [row["eta_g"] > 0 for row in loop.history] == [True, True, False, True, True, False, False, False]
    # Mended, it goes on.
    resumed = make_skipping_loop(max_rounds=9, server=FedDuAdam(), precision="64-true")
    resumed.fit(Mended(rounds=(2, 5, 6, 7)), regression(), ckpt_path="last")
    assert resumed.history[-1]["clients"] == 4


@pytest.mark.filterwarnings("ignore:Client")
def test_buffers_stay_without_clients(make_skipping_loop):
    model = Picky()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loop = make_skipping_loop(max_rounds=2)
    loop.fit(model, {"bad": five_columns()})
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.filterwarnings("ignore:Client")
@pytest.mark.parametrize("devices", [1, 2])
def test_mime_does_without_the_gradients_of_clients_that_fail(make_skipping_loop, tmp_path, devices):
    ranks = {} if devices == 1 else {"devices": 2, "strategy": "ddp_fork"}
    arguments = {"server": FedAvg(), "client": Mime(), "precision": "64-true", "engine": "sequential"}
    good = make_skipping_loop(**arguments, out_dir=tmp_path / "good")
    expected, found = (FailsInRounds(rounds=(0, 1, 2), sizes=(6,)) for _ in range(2))
    good.fit(expected, regression(sizes=(3, 4, 5)))
    loop = make_skipping_loop(**arguments, **ranks)
    loop.fit(found, regression())
    assert [row["skipped_clients"] for row in loop.history] == [1, 1, 1]
    assert_same(found, expected)


def test_failures_at_random_are_counted(make_skipping_loop):
    class Flaky(LinearRegression):
        def training_step(self, batch, batch_idx):
            # Drawn from the client's own generator: the same clients on any number of ranks.
            if torch.rand(()) < 0.2:
                raise RuntimeError("flaky")
            return super().training_step(batch, batch_idx)

    loop = make_skipping_loop(max_rounds=6, local_steps=2, precision="64-true", clients_per_round=8, validate_every=0)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        loop.fit(Flaky(dim=10), SyntheticRegression(num_clients=10, dim=10))
    left_out = [match for w in noted if (match := re.search(r"`(.+)` is left out of round (\d)", str(w.message)))]
    skipped = [row["skipped_clients"] for row in loop.history]
    assert [sum(int(match[2]) == round for match in left_out) for round in range(6)] == skipped
    assert 5 < sum(skipped) < 40
    assert all(row["clients"] + row["skipped_clients"] == 8 for row in loop.history)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_updates_are_clipped_in_the_mean_and_in_the_norms(make_skipping_loop, engine):
    class Deltas(FederatedCallback):
        deltas = []

        def on_client_end(self, loop):
            self.deltas.append(loop.module.linear.weight.detach().numpy().flatten() - loop.weights.numpy())

    callback = Deltas()
    arguments = {"max_rounds": 1, "server": FedAvg(), "precision": "64-true", "client_weights": "samples"}
    make_skipping_loop(**arguments, callbacks=callback, engine="sequential").fit(
        LinearRegression(dim=10, lr=0.05), regression()
    )
    deltas = np.array(callback.deltas)
    norms = np.linalg.norm(deltas, axis=1)
    largest = np.sort(norms)[1] * 1.001  # two clients are longer
    clipped = deltas * np.minimum(1, largest / norms)[:, None]
    record = Record()
    loop = make_skipping_loop(
        **arguments, callbacks=record, max_update_norm=largest, engine=engine, on_client_error="raise"
    )
    loop.fit(LinearRegression(dim=10, lr=0.05), regression())
    mean, squared_norms = record.updates[0]
    np.testing.assert_allclose(mean, np.average(clipped, axis=0, weights=[3, 4, 5, 6]), rtol=1e-10)
    np.testing.assert_allclose(np.sort(squared_norms), np.sort(np.square(clipped).sum(axis=1)), rtol=1e-10)
    assert (squared_norms > largest**2 * 0.999).sum() == 2
