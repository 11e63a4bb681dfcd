import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel, RandomDataset
from torch.utils.data import TensorDataset

from lightning_feddua import (
    AdaAlter,
    ConfigurationError,
    FedAvg,
    FedDuAdagrad,
    FedDualAvg,
    FederatedCallback,
    FederatedDataModule,
    FederatedLoop,
    FedMid,
    FedProx,
    LocalTraining,
    Mime,
    MimeLite,
    Scaffnew,
    Scaffold,
)
from lightning_feddua.models import LinearRegression
from tests.clients import client_oracle
from tests.clients.client_oracle import LeastSquares, Run
from tests.modules import Classifier, classification

ENGINES = ["sequential", "vectorized"]
# On 2 ranks the clients of a cohort change places, so that their states move.
PLACES = [("sequential", 1), ("vectorized", 1), ("sequential", 2), ("vectorized", 2)]


def fit(client, run, tmp_path, engine="sequential", devices=1, server=None, model=LinearRegression, ckpt_path=None,
        **arguments):  # fmt: skip
    """The loop of a run on its problem, and the final weights."""
    problem = run.problem
    clients = {
        str(i): TensorDataset(torch.from_numpy(X), torch.from_numpy(y).unsqueeze(1))
        for i, (X, y) in enumerate(zip(problem.X, problem.y, strict=True))
    }
    module = model(problem.dim, lr=run.lr)
    loop = FederatedLoop(
        server=server or FedAvg(eta_g=run.eta_g),
        client=client,
        max_rounds=run.rounds,
        clients_per_round=run.cohort,
        engine=engine,
        devices=devices,
        strategy="ddp_fork" if devices > 1 else "auto",
        accelerator="cpu",
        precision="64-true",
        out_dir=tmp_path,
        enable_progress_bar=False,
        **{"local_steps": run.steps, **arguments},
    )
    loop.fit(module, FederatedDataModule(clients, batch_size=run.batch), ckpt_path)
    return loop, module.linear.weight.detach().double().numpy().ravel()


def settings(cohort=3, **changes):
    return Run(**{"problem": LeastSquares.random(), "rounds": 20, "cohort": cohort, "steps": 4, "batch": 4, "lr": 0.05,
                  "eta_g": 0.8, **changes})  # fmt: skip


ADAM = {"statistics": "adam", "beta1": 0.8, "beta2": 0.95, "eps": 0.1}
MOMENTUM = {"statistics": "momentum", "beta1": 0.7, "beta2": 0.99, "eps": 1e-3}
ALGORITHMS = {
    "plain": (LocalTraining, lambda run: client_oracle.plain(run), {}),
    "fedprox": (lambda: FedProx(mu=0.3), lambda run: client_oracle.fedprox(run, 0.3), {}),
    "scaffold I": (lambda: Scaffold("I"), lambda run: client_oracle.scaffold(run, "I")[0], {}),
    "scaffold II": (lambda: Scaffold("II"), lambda run: client_oracle.scaffold(run, "II")[0], {}),
    "adaalter": (lambda: AdaAlter(eps=0.7, initial_accumulator=0.5),
                 lambda run: client_oracle.adaalter(run, 0.7, 0.5), {}),
    "mime": (lambda: Mime("none"), lambda run: client_oracle.mime(run, "none", 0, 0, 0, lite=False), {}),
    "mime momentum": (lambda: Mime(**MOMENTUM), lambda run: client_oracle.mime(run, **MOMENTUM, lite=False), {}),
    "mime adam": (lambda: Mime(**ADAM), lambda run: client_oracle.mime(run, **ADAM, lite=False), {}),
    "mimelite momentum": (lambda: MimeLite(**MOMENTUM), lambda run: client_oracle.mime(run, **MOMENTUM, lite=True), {}),
    "mimelite adam": (lambda: MimeLite(**ADAM), lambda run: client_oracle.mime(run, **ADAM, lite=True), {}),
    "scaffnew": (lambda: Scaffnew(0.4), lambda run: client_oracle.scaffnew(run, 0.4)[0], {"cohort": 5, "eta_g": 1.0}),
    "fedmid": (lambda: FedMid(l1=0.05), lambda run: client_oracle.fedmid(run, 0.05), {}),
    "feddualavg": (lambda: FedDualAvg(l1=0.05), lambda run: client_oracle.feddualavg(run, 0.05), {}),
}  # fmt: skip


@pytest.mark.parametrize(("engine", "devices"), PLACES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_agrees_with_numpy(name, engine, devices, tmp_path):
    make, oracle, changes = ALGORITHMS[name]
    run = settings(**changes)
    expected = oracle(run)
    _, found = fit(make(), run, tmp_path, engine, devices)
    assert np.linalg.norm(expected) > 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_fedprox_without_strength_is_plain_training_bit_for_bit(engine, tmp_path):
    data = {str(i): classification(12, seed=i) for i in range(4)}
    results = []
    for client in (LocalTraining(), FedProx(mu=0.0)):
        torch.manual_seed(0)
        module = Classifier()
        loop = FederatedLoop(client=client, max_rounds=3, local_steps=3, gradient_clip_val=0.5, engine=engine,
                             out_dir=tmp_path, enable_progress_bar=False)  # fmt: skip
        loop.fit(module, data)
        results.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*results)


class ControlVariates(FederatedCallback):
    """Compares the mean of all c_i with c before each round."""

    def __init__(self):
        self.errors = []

    def on_round_start(self, loop):
        mean = sum(loop.states.get(i)[0] for i in range(5)) / 5
        c = loop.client.vectors["c"]
        self.errors.append(((mean - c).norm() / max(c.norm().item(), 1e-3)).item())


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_control_variates_of_scaffold_sum_to_that_of_the_server(option, weights, tmp_path):
    callback = ControlVariates()
    loop, _ = fit(Scaffold(option), settings(), tmp_path, callbacks=callback, client_weights=weights)
    assert loop.client.vectors["c"].norm() > 0.1
    assert max(callback.errors) < 1e-12


def test_with_one_local_step_scaffold_fedavg_and_mime_coincide(tmp_path):
    run = settings(cohort=5, steps=1, batch=50)
    results = [fit(client, run, tmp_path)[1] for client in (LocalTraining(), Scaffold(), Mime("none"))]
    np.testing.assert_allclose(results[1], results[0], atol=1e-12)
    np.testing.assert_allclose(results[2], results[0], atol=1e-12)


def test_scaffnew_that_always_communicates_is_gradient_descent(tmp_path):
    run = settings(cohort=5, batch=50, eta_g=1.0)
    w = np.zeros(run.problem.dim)
    for _ in range(run.rounds):
        w = w - run.lr * np.mean([run.problem.gradient(i, w) for i in range(5)], axis=0)
    np.testing.assert_allclose(fit(Scaffnew(1.0), run, tmp_path)[1], w, atol=1e-12)


@pytest.mark.slow
def test_scaffold_and_scaffnew_reach_the_optimum_where_fedavg_stalls(tmp_path):
    run = settings(cohort=5, batch=50, eta_g=1.0, rounds=150, steps=10, lr=0.1)
    optimum = run.problem.optimum()

    def error(client):
        return np.linalg.norm(fit(client, run, tmp_path, validate_every=0)[1] - optimum)

    assert error(LocalTraining()) > 0.1
    assert error(Scaffold()) < 1e-9
    assert error(Scaffnew(0.1)) < 1e-9


def test_states_are_kept_for_clients_that_took_part_alone(tmp_path):
    loop, _ = fit(Scaffold(), settings(rounds=1), tmp_path)
    assert len(loop.states) == 3


@pytest.mark.parametrize("devices", [1, 2])
def test_states_on_disk_give_the_same_run(devices, tmp_path):
    run = settings()
    memory = fit(Scaffold(), run, tmp_path, devices=devices)[1]
    disk = fit(Scaffold(), run, tmp_path, devices=devices, client_states="disk")[1]
    assert np.array_equal(memory, disk)


def test_fedduadagrad_with_scaffold_agrees_with_numpy(tmp_path):
    run = settings()
    problem, n = run.problem, len(run.problem.X)
    w, c, c_i, s = (np.zeros(shape) for shape in (problem.dim, problem.dim, (n, problem.dim), problem.dim))
    for t in range(run.rounds):
        cohort, deltas, changes = run.clients(t), [], []
        for i in cohort:
            x = w.copy()
            for rows in run.batches(t, i):
                x = x - run.lr * (problem.gradient(i, x, rows) + c - c_i[i])
            changes.append(-c - (x - w) / (run.steps * run.lr))
            c_i[i] += changes[-1]
            deltas.append(x - w)
        mean = np.mean(deltas, axis=0)
        s = s + mean**2
        G = np.sqrt(s) + 1e-9
        w = w + 0.5 * np.mean(np.square(deltas).sum(1)) / (mean**2 / G).sum() * mean / G
        c = c + len(cohort) / n * np.mean(changes, axis=0)
    found = fit(Scaffold(), run, tmp_path, server=FedDuAdagrad())[1]
    np.testing.assert_allclose(found, w, rtol=1e-9)


class Momentum(LinearRegression):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Scheduled(LinearRegression):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class AdamClient(LinearRegression):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class OneByOne(LocalTraining):
    supports_vectorized = False


@pytest.mark.parametrize(
    ("client", "arguments", "message"),
    [
        (Scaffnew(), {"cohort": 3, "eta_g": 1.0}, "needs all 5 clients in each round"),
        (Scaffnew(), {"cohort": 5, "eta_g": 0.5}, "averages the clients' weights"),
        (Scaffold(), {"model": Momentum}, "uses SGD with momentum"),
        (Scaffold(), {"model": Scheduled}, "has a learning-rate scheduler"),
        (MimeLite(), {"model": AdamClient}, "uses `Adam`"),
        (FedMid(0.1), {"server": FedDuAdagrad()}, "needs a constant server step"),
        (FedDualAvg(0.1), {"local_steps": None, "local_epochs": 1}, "the same number of local steps"),
        (OneByOne(), {"engine": "vectorized"}, "cannot run vectorized"),
    ],
)
def test_what_an_algorithm_cannot_do_is_said_before_training(client, arguments, message, tmp_path):
    own = {name: arguments[name] for name in ("cohort", "eta_g") if name in arguments}
    rest = {name: value for name, value in arguments.items() if name not in own}
    with pytest.raises(ConfigurationError, match=message):
        fit(client, settings(**own), tmp_path, **rest)
    assert not (tmp_path / "version_0").exists()


def test_a_module_that_makes_its_own_steps_is_refused(tmp_path):
    loop = FederatedLoop(client=FedProx(), max_rounds=1, local_steps=1, out_dir=tmp_path, enable_progress_bar=False)
    with pytest.raises(ConfigurationError, match="makes them itself"):
        loop.fit(ManualOptimBoringModel(), {"a": RandomDataset(32, 8), "b": RandomDataset(32, 8)})


@pytest.mark.parametrize(
    "make",
    [lambda: FedProx(-1), lambda: Scaffold("III"), lambda: Mime("rmsprop"), lambda: Mime(beta1=1), lambda: FedMid(-1),
     lambda: Scaffnew(0), lambda: AdaAlter(eps=0), lambda: MimeLite(eps=0)],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(make):
    with pytest.raises(ConfigurationError):
        make()
