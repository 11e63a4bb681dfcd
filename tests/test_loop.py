import csv
import json
from importlib.metadata import version

import numpy as np
import pytest
import torch
from lightning import LightningModule
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.utils.data import TensorDataset

from lightning_feddua import (
    ClientError,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDuAdagrad,
    FedDuAdam,
    FederatedCallback,
    FederatedLoop,
    FedExP,
)
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.models import LinearRegression
from tests.modules import Classifier
from tests.servers.oracle import Server, gradient_descent_deltas


@pytest.mark.parametrize(
    ("server", "oracle", "lr"),
    [
        (FedDuAdagrad(eps=0.0), Server("adagrad"), 0.1),
        (FedDuAdam(eps=0.0), Server("adam", beta1=0.9), 0.1),
        # FedExP's long steps amplify rounding errors from 1e-16 to 1e-6 in 30 rounds at larger rates, in NumPy as well.
        (FedExP(), Server(), 0.001),
        (FedAvgM(eta_g=0.5), Server(eta=0.5, beta1=0.9, heavy_ball=True), 0.1),
    ],
    ids=["FedDuAdagrad", "FedDuAdam", "FedExP", "FedAvgM"],
)
def test_loop_agrees_with_closed_form_of_gradient_descent(make_loop, server, oracle, lr):
    data = SyntheticRegression()
    xs, ys = zip(*(tuple(t.numpy() for t in c.tensors) for c in data.clients.values()), strict=True)
    ys = [y[:, 0] for y in ys]
    w, before, losses = np.zeros(1000), np.zeros(1000), []
    for _ in range(30):
        before = w
        w, _ = oracle.step(w, gradient_descent_deltas(xs, ys, w, lr, steps=20))
        evaluated = (w + before) / 2 if oracle.eta is None else w
        losses.append(np.mean([0.5 * np.mean((x @ evaluated - y) ** 2) for x, y in zip(xs, ys, strict=True)]))

    loop = make_loop(server=server, max_rounds=30, local_steps=20, precision="64-true")
    model = LinearRegression(lr=lr)
    loop.fit(model, data)
    np.testing.assert_allclose(model.linear.weight.detach().numpy()[0], w, rtol=1e-8, atol=1e-8 * np.abs(w).max())
    np.testing.assert_allclose([row["val_loss"] for row in loop.history], losses, rtol=1e-8)


def test_heterogeneity_compares_the_clients_with_their_mean(make_loop):
    data = SyntheticRegression(num_clients=5, dim=30)
    xs, ys = zip(*(tuple(t.numpy() for t in c.tensors) for c in data.clients.values()), strict=True)
    deltas = gradient_descent_deltas(xs, [y[:, 0] for y in ys], np.zeros(30), lr=0.1, steps=4)
    loop = make_loop(max_rounds=1, precision="64-true")
    loop.fit(LinearRegression(dim=30, lr=0.1), data)
    expected = (deltas**2).sum(1).mean() / (deltas.mean(0) ** 2).sum()
    assert loop.history[0]["heterogeneity"] == pytest.approx(expected, rel=1e-10)


def test_run_info_says_what_ran_where(make_loop, clients):
    loop = make_loop(max_rounds=1)
    loop.fit(Classifier(), clients)
    info = json.loads((loop.run_dir / "run.json").read_text())
    assert info["header"][0].endswith("FedDuAdagrad on Classifier")
    assert info["environment"]["torch"] == version("torch")


def test_fedavg_is_the_mean_of_training_alone(make_loop, clients):
    """One round of FedAvg against each client trained by hand from the same start."""
    model = Classifier(dropout=0.0)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    loop = make_loop(server=FedAvg(), max_rounds=1, local_epochs=1)
    trained = []

    class Keep(FederatedCallback):
        def on_client_end(self, loop, client_id):
            trained.append({name: value.clone() for name, value in loop.module.state_dict().items()})

    loop = make_loop(server=FedAvg(), max_rounds=1, local_epochs=1, callbacks=Keep())
    loop.fit(model, clients)
    assert len(trained) == 4
    for name, value in model.state_dict().items():
        if name == "net.1.num_batches_tracked":
            assert value == 4  # the client of 75 samples made 4 batches of 20
        elif "running" in name:
            mean = torch.stack([state[name] for state in trained]).mean(0)
            torch.testing.assert_close(value, mean, rtol=1e-6, atol=1e-7)
        else:
            mean = torch.stack([state[name] for state in trained]).mean(0)
            torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6)
            assert not torch.equal(value, start[name])


@pytest.mark.parametrize("server", [FedAdam(eta_g=0.1), FedDuAdam()], ids=["FedAdam", "FedDuAdam"])
def test_buffers_never_go_through_the_server(make_loop, clients, server):
    """Under any rule, running statistics are the plain mean of the clients' and counters their maximum."""
    rounds = []

    class Keep(FederatedCallback):
        def on_round_start(self, round):
            rounds.append([])

        def on_client_end(self, loop):
            batch_norm = loop.module.net[1]
            rounds[-1].append((batch_norm.running_mean.clone(), batch_norm.running_var.clone()))

        def on_round_end(self, loop, round):
            batch_norm = loop.module.net[1]
            mean, var = (torch.stack(values).mean(0) for values in zip(*rounds[-1], strict=True))
            torch.testing.assert_close(batch_norm.running_mean, mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(batch_norm.running_var, var, rtol=1e-5, atol=1e-6)
            assert (batch_norm.running_var > 0).all()
            assert batch_norm.num_batches_tracked == 4 * (round + 1)

    make_loop(server=server, max_rounds=10, callbacks=Keep()).fit(Classifier(), clients)
    assert len(rounds) == 10


def test_history_csv_and_logger(make_loop, clients, tmp_path):
    logger = CSVLogger(tmp_path / "lightning")
    loop = make_loop(max_rounds=4, validate_every=3, loggers=logger)
    loop.fit(Classifier(), clients)
    logger.save()
    assert [row["round"] for row in loop.history] == [0, 1, 2, 3]
    assert all({"eta_g", "loss", "train_acc", "seconds"} <= row.keys() for row in loop.history)
    assert [("val_acc" in row, "last_iterate/val_acc" in row) for row in loop.history] == [
        (False, False),
        (False, False),
        (True, True),
        (True, True),
    ]
    with (loop.run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["round"]) for row in rows] == [0, 1, 2, 3]
    assert float(rows[3]["val_acc"]) == loop.history[3]["val_acc"]
    assert rows[0]["val_acc"] == ""
    with (tmp_path / "lightning/lightning_logs/version_0/metrics.csv").open() as file:
        assert [float(row["eta_g"]) for row in csv.DictReader(file)] == [row["eta_g"] for row in loop.history]


def test_adaptive_rules_report_the_averaged_iterate(make_loop, clients):
    weights = []

    class Keep(FederatedCallback):
        def on_round_end(self, loop):
            weights.append(loop.weights.clone())

    loop = make_loop(server=FedExP(), callbacks=[Keep()])
    model = Classifier()
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    loop.fit(model, clients)
    last = loop.history[-1]
    assert loop.validate(model, clients)["val_loss"] == pytest.approx(last["last_iterate/val_loss"], rel=1e-6)
    nn.utils.vector_to_parameters((weights[-1] + weights[-2]) / 2, model.parameters())
    assert loop.validate(model, clients)["val_loss"] == pytest.approx(last["val_loss"], rel=1e-5)
    assert not torch.equal(start, weights[0])


def test_fit_twice_starts_afresh_and_two_loops_live_together(make_loop, clients):
    first, second = make_loop(), make_loop()
    results = []
    for loop in (first, first, second):
        torch.manual_seed(3)
        model = Classifier()
        loop.fit(model, clients)
        results.append(model.state_dict())
        assert len(loop.history) == 3
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0].values(), other.values(), strict=True))


def test_module_is_given_back_in_order(make_loop, clients):
    model = Classifier()
    random_state = torch.get_rng_state()
    make_loop().fit(model, clients)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert "log" not in vars(model)
    assert model._trainer is None
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == len(list(model.parameters()))


def test_weights_by_samples(make_loop):
    """Two clients whose optimum differs, one local step: the mean is weighted by their sizes."""
    data = {
        name: TensorDataset(torch.ones(n, 1), torch.full((n, 1), y)) for name, n, y in [("a", 1, 0.0), ("b", 3, 8.0)]
    }
    results = []
    for weights in ("uniform", "samples"):
        model = LinearRegression(dim=1, lr=1.0)
        make_loop(server=FedAvg(), max_rounds=1, local_steps=1, client_weights=weights).fit(model, data)
        results.append(model.linear.weight.item())
    assert results == [4.0, 6.0]


def test_callbacks_fire_in_order(make_loop, clients):
    events = []

    class Recorder(FederatedCallback):
        def on_fit_start(self):
            events.append("fit")

        def on_round_start(self, round, cohort):
            events.append(("round", round, len(cohort)))

        def on_client_start(self, client_id):
            events.append(client_id)

        def on_aggregate_end(self, loop, update):
            events.append(("aggregate", len(update.squared_norms)))
            update.mean_delta.zero_()  # comes before the server

        def on_validation_end(self, metrics):
            events.append(sorted(metrics))

        def on_round_end(self, loop, round):
            events.append(("end", loop.history[-1]["round"]))

        def on_fit_end(self):
            events.append("done")

    model = Classifier()
    before = [p.clone() for p in model.parameters()]
    make_loop(server=FedAvg(), max_rounds=1, clients_per_round=0.5, callbacks=[Recorder()]).fit(model, clients)
    assert events[:2] == ["fit", ("round", 0, 2)]
    assert set(events[2:4]) <= set("abcd")
    assert events[4:] == [("aggregate", 2), ["val_acc", "val_loss"], ("end", 0), "done"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_failing_client_is_named_and_finished_rounds_are_kept(make_loop, clients):
    seen = []

    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            if self.trainer.current_round == 2:
                raise RuntimeError("broken sample")
            return super().training_step(batch, batch_idx)

    class Recorder(FederatedCallback):
        def on_exception(self, exception):
            seen.append(exception)

    loop = make_loop(max_rounds=5, callbacks=[Recorder()])
    with pytest.raises(ClientError, match=r"Client `a` failed in round 2 during local training: RuntimeError: broken"):
        loop.fit(Fails(), clients)
    assert isinstance(seen[0].__cause__, RuntimeError)
    assert len((loop.run_dir / "metrics.csv").read_text().splitlines()) == 3


def test_progress_and_header_on_a_pipe(tmp_path, clients, capsys):
    loop = FederatedLoop(
        max_rounds=2, local_steps=1, out_dir=tmp_path, accelerator="cpu", clients_per_round=2, engine="sequential"
    )
    loop.fit(Classifier(), clients)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("FedDuAdagrad on Classifier")
    assert "75 trainable" in lines[1]
    assert "2 of 4 clients per round, 1 local step of" in lines[2]
    assert "sequential, on 1 rank: cpu" in lines[3]
    assert lines[-3].startswith("round 2/2  eta_g")
    assert lines[-2] == f"results in {loop.run_dir}"
    assert lines[-1].endswith(f"loop.max_rounds = 4; loop.fit(model, datamodule, ckpt_path='{loop.run_dir}/last.ckpt')")


def test_second_fit_counts_from_the_start(make_loop, clients):
    rounds = []

    class Keep(FederatedCallback):
        def on_fit_start(self, loop):
            rounds.append(loop.current_round)

    loop = make_loop(callbacks=(Keep(),))
    loop.fit(Classifier(), clients)
    loop.fit(Classifier(), clients)
    assert rounds == [0, 0]


def test_module_holds_the_global_weights_when_a_round_ends(make_loop, clients):
    class Check(FederatedCallback):
        def on_round_end(self, loop):
            own = torch.cat([p.detach().reshape(-1) for p in loop.module.parameters()])
            assert torch.equal(own, loop.weights)

    make_loop(callbacks=Check(), validate_every=2).fit(Classifier(), clients)


def test_transforming_tensor_datasets_are_respected(make_loop):
    class Doubled(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return 2 * x, y

    data = {"a": Doubled(torch.ones(1, 1), torch.full((1, 1), 8.0))}
    model = LinearRegression(dim=1, lr=0.25)
    make_loop(server=FedAvg(), max_rounds=1, local_steps=1).fit(model, data)
    assert model.linear.weight.item() == 4.0  # 0 + ¼ · 2 · 8


def test_divergence_is_said(make_loop):
    data = {"a": TensorDataset(torch.full((1, 1), 1e20), torch.zeros(1, 1))}
    model = LinearRegression(dim=1, lr=1.0)
    torch.nn.init.ones_(model.linear.weight)
    with pytest.raises(ClientError, match="Client `a` failed in round 0 during local training: its update is not fin"):
        make_loop(server=FedAvg(), max_rounds=1, local_steps=3).fit(model, data)


def test_what_callbacks_find_after_a_failure(make_loop, clients):
    """The weights of the last complete round, also in the memory that is lent to the sums of a round."""

    started = []

    class Fails(Classifier):
        def on_train_start(self):
            started.append(1)

        def training_step(self, batch, batch_idx):
            if len(started) == 10:
                raise RuntimeError("here")
            return super().training_step(batch, batch_idx)

    class Keeper(FederatedCallback):
        def on_round_end(self, loop):
            self.weights = loop.weights.clone()

        def on_exception(self, loop):
            self.found = loop.weights.clone(), loop.average.clone()

    keeper = Keeper()
    with pytest.raises(ClientError, match="here"):
        make_loop(server=FedDuAdagrad(), engine="sequential", callbacks=[keeper]).fit(Fails(), clients)
    assert all(torch.equal(found, keeper.weights) for found in keeper.found)


def test_validation_data_without_a_step_is_said(make_loop):
    class NoStep(LinearRegression):
        validation_step = LightningModule.validation_step

    data = SyntheticRegression(num_clients=2, dim=5)
    with pytest.warns(UserWarning, match="does not define `validation_step`"):
        make_loop(precision="64-true").fit(NoStep(dim=5), data)
