import warnings

import numpy as np
import pytest
import torch
import yaml

from lightning_feddua import (
    AdaAlter,
    Combined,
    ConfigurationError,
    FedDuAdagrad,
    FedMid,
    FedProx,
    LocalRound,
    LocalTraining,
    RoundUpdate,
    Scaffnew,
    Scaffold,
)
from lightning_feddua.checkpoints.files import FEDERATED
from lightning_feddua.cli import commands as cli
from tests.clients.test_local_training import ALGORITHMS, ENGINES, PLACES, fit, settings
from tests.servers import oracle


def prox_in_scaffold(run, mu):
    """Local steps ``g + μ (x − w) + c − c_i`` under FedDuAdagrad: weights, c and all c_i."""
    problem, n = run.problem, len(run.problem.X)
    server = oracle.Server("adagrad", eps=1e-9)
    w, c, c_i = (np.zeros(shape) for shape in (problem.dim, problem.dim, (n, problem.dim)))
    for t in range(run.rounds):
        cohort, deltas, changes = run.clients(t), [], []
        for i in cohort:
            x = w.copy()
            for rows in run.batches(t, i):
                x = x - run.lr * (problem.gradient(i, x, rows) + mu * (x - w) + c - c_i[i])
            changes.append(-c - (x - w) / (run.steps * run.lr))
            c_i[i] += changes[-1]
            deltas.append(x - w)
        w, _ = server.step(w, np.array(deltas))
        c = c + len(cohort) / n * np.mean(changes, axis=0)
    return w, c, c_i


@pytest.mark.parametrize(("engine", "devices"), PLACES)
def test_fedprox_inside_scaffold_agrees_with_numpy(engine, devices, tmp_path):
    run = settings()
    w, c, _ = prox_in_scaffold(run, mu=0.3)
    client = Combined([FedProx(0.3), Scaffold()])
    loop, found = fit(client, run, tmp_path, engine, devices, server=FedDuAdagrad())
    assert np.linalg.norm(w) > 0.1
    np.testing.assert_allclose(found, w, rtol=0, atol=1e-9)
    np.testing.assert_allclose(loop.client.vectors["1.Scaffold.c"].numpy(), c, rtol=0, atol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_with_parts_that_do_nothing_an_algorithm_is_itself_bit_for_bit(name, engine, tmp_path):
    make, _, changes = ALGORITHMS[name]
    run = settings(rounds=4, **changes)
    alone = fit(make(), run, tmp_path, engine)[1]
    together = fit(Combined([FedProx(0), make(), LocalTraining()]), run, tmp_path, engine)[1]
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_of_one_class_and_nested_parts_do_not_share_names(engine, tmp_path):
    run = settings(rounds=4)

    def weights(client):
        return fit(client, run, tmp_path, engine, server=FedDuAdagrad())[1]

    flat = weights(Combined([FedProx(0.1), AdaAlter(), Scaffold()]))
    nested = weights(Combined([FedProx(0.1), Combined([AdaAlter(), Combined([Scaffold()])])]))
    assert np.array_equal(nested, flat)
    twice = weights(Combined([FedProx(0.1), FedProx(0.2)]))
    np.testing.assert_allclose(twice, weights(FedProx(0.1 + 0.2)), rtol=1e-12)


def test_the_order_counts(tmp_path):
    run = settings(rounds=4)
    first, second = (fit(Combined(parts), run, tmp_path)[1] for parts in (
        [FedProx(0.5), AdaAlter()], [AdaAlter(), FedProx(0.5)]))  # fmt: skip
    assert not np.allclose(first, second)


def test_a_combined_run_resumes_bit_for_bit(tmp_path):
    def client(mu=0.1):
        return Combined([FedProx(mu), Combined([Scaffold()])])

    run = settings(rounds=6)
    whole = fit(client(), run, tmp_path / "whole")
    fit(client(), settings(rounds=3), tmp_path / "cut", checkpoint_every=1)
    loop, resumed = fit(client(), run, tmp_path / "cut", ckpt_path="last")
    assert len(loop.history) == 6
    assert np.array_equal(resumed, whole[1])
    name = "1.Combined.0.Scaffold.c"
    assert torch.equal(loop.client.vectors[name], whole[0].client.vectors[name])
    with pytest.raises(ConfigurationError, match=r"`client.algorithms.0.mu` was `0.1` and is `0.2`"):
        fit(client(0.2), run, tmp_path / "cut", ckpt_path="last")


def test_a_state_of_other_parts_is_refused():
    with pytest.raises(ConfigurationError, match="belongs to `FedProx`, and this is `Scaffold`"):
        Combined([Scaffold()]).load_state_dict(Combined([FedProx()]).state_dict())
    with pytest.raises(ConfigurationError, match="belongs to `FedProx`, and this is `Combined`"):
        Combined([Scaffold()]).load_state_dict(FedProx().state_dict())


def test_a_recipe_combines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = [{"class_path": "FedProx", "init_args": {"mu": 0.1}}, {"class_path": "Scaffold"}]
    recipe = {
        "server": {"class_path": "FedDuAdagrad"},
        "client": {"class_path": "Combined", "init_args": {"algorithms": parts}},
        "model": {"class_path": "LinearRegression", "init_args": {"dim": 5}},
        "data": {"class_path": "SyntheticRegression", "init_args": {"dim": 5, "num_clients": 3}},
        "loop": {"max_rounds": 2, "local_steps": 2, "precision": "64-true", "enable_progress_bar": False},
    }
    (tmp_path / "combined.yaml").write_text(yaml.safe_dump(recipe))
    assert cli.main(["fit", "--config", "combined.yaml", "--loop.checkpoint_every", "1"]) == 0
    (path,) = tmp_path.glob("runs/**/last.ckpt")
    saved = torch.load(path, weights_only=True)[FEDERATED]
    assert saved["identity"]["settings"]["client.algorithms.0.mu"] == 0.1
    first, second = saved["parts"]["client"]["parts"]
    assert (first["algorithm"], second["algorithm"]) == ("FedProx", "Scaffold")
    assert second["vectors"]["c"].norm() > 0


class Fading(LocalTraining):
    """A pull whose strength changes with the rounds, in a plain attribute."""

    def begin_round(self, lr, mean_gradient):
        self._strength = getattr(self, "_strength", 2.0) / 2

    def correct(self, gradient, weights, local):
        gradient.add_(weights - local.anchor, alpha=self._strength)


@pytest.mark.slow
def test_compiled_steps_see_what_is_inside_the_parts(tmp_path):
    run = settings(rounds=3, batch=4)
    results = []
    for compile in (False, True):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*not compiled.*")
            client = Combined([Fading(), Scaffold()])
            results.append(fit(client, run, tmp_path, "vectorized", compile=compile)[1])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-9)


class Hoarder(LocalTraining):
    def set_up(self, weights, population, local_steps):
        self.tensor = torch.ones(1)


def test_compiled_steps_refuse_tensors_that_a_part_hides(tmp_path):
    with pytest.warns(UserWarning, match="keeps tensors outside its `vectors`"):
        fit(Combined([FedProx(), Hoarder()]), settings(rounds=1), tmp_path, "vectorized", compile=True)


def test_all_needs_are_those_of_the_parts():
    def flags(cls):
        return {name for name in dir(cls) if isinstance(getattr(cls, name), bool | property | tuple)}

    derived = {"extra_client_cost", "vectors_sent", "gradient_evaluations"}
    assert {name for name in flags(LocalTraining) if name not in vars(Combined)} - {"__slots__"} == derived
    combined = Combined([FedProx(), Scaffold("I")])
    assert (combined.needs_constant_lr, combined.needs_full_gradient, combined.needs_all_clients) == (True, True, False)
    assert (combined.vectors_sent, combined.gradient_evaluations) == (2, "τ + full")
    plain = Combined([LocalTraining()])
    assert not any([plain.touches_steps, plain.corrects, plain.draws_steps, plain.extra_client_cost])

    class OneByOne(LocalTraining):
        supports_vectorized = False

    assert plain.supports_vectorized
    assert not Combined([FedProx(), OneByOne()]).supports_vectorized


class CountsSteps(LocalTraining):
    """Sends τ_i."""

    client_scalars = ("tau",)

    def start(self, local):
        local.scratch["own"] = local.anchor.clone()

    def finish(self, delta, local):
        del local.scratch["own"]
        local.scalars["tau"] = float(local.step)
        return {}

    def aggregate(self, weights, update, eta_g):
        self.seen = dict(update.scalars)


def test_scalars_of_parts_have_names_of_their_own():
    client = Combined([CountsSteps(), FedProx(), CountsSteps()])
    assert client.client_scalars == ("0.CountsSteps.tau", "2.CountsSteps.tau")
    local = LocalRound(torch.zeros(3), lr=0.1, step=4)
    client.start(local)
    assert set(local.scratch) == {"0.CountsSteps.own", "2.CountsSteps.own"}
    assert client.finish(torch.zeros(3), local) == {}
    assert local.scratch == {}
    assert local.scalars == {"0.CountsSteps.tau": 4.0, "2.CountsSteps.tau": 4.0}
    taus = {"0.CountsSteps.tau": torch.tensor([4.0, 5.0]), "2.CountsSteps.tau": torch.tensor([6.0, 7.0])}
    client.aggregate(torch.zeros(3), RoundUpdate(torch.zeros(3), torch.ones(2), scalars=taus), 1.0)
    first, _, last = client.algorithms
    assert [part.seen["tau"].tolist() for part in (first, last)] == [[4.0, 5.0], [6.0, 7.0]]
    assert all(part.seen.keys() == {"tau"} for part in (first, last))


PROX = FedProx()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], r"`algorithms=\[\]` has no algorithms"),
        (FedProx(), "has no algorithms"),
        ([FedProx(), "Scaffold"], r"The algorithm is `'Scaffold'`\. Give an instance of `LocalTraining`"),
        ([PROX, PROX], "the same object twice"),
        ([Scaffnew(), FedProx(), Scaffnew()], r"`Scaffnew` and `Scaffnew` both draw the number of local steps"),
        ([Combined([Scaffnew()]), Scaffnew()], "both draw the number of local steps"),
    ],
)
def test_nonsense_is_refused(parts, message):
    with pytest.raises(ConfigurationError, match=message):
        Combined(parts)


@pytest.mark.parametrize(
    ("client", "arguments", "message"),
    [
        (Combined([FedProx(), Scaffnew()]), {"cohort": 3, "eta_g": 1.0}, "`Scaffnew` needs all 5 clients"),
        (Combined([FedProx(), Scaffnew()]), {"cohort": 5, "eta_g": 0.5}, "averages the clients' weights"),
        (Combined([FedMid(0.1), FedProx()]), {"server": FedDuAdagrad()}, "`FedMid` needs a constant server step"),
        (Combined([Scaffnew()]), {"cohort": 5, "eta_g": 1.0, "on_client_error": "skip"}, "`Scaffnew` needs all"),
    ],
)
def test_what_a_part_cannot_do_is_said_in_its_name(client, arguments, message, tmp_path):
    own = {name: arguments[name] for name in ("cohort", "eta_g") if name in arguments}
    with pytest.raises(ConfigurationError, match=message):
        fit(client, settings(**own), tmp_path, **{k: v for k, v in arguments.items() if k not in own})


class Returning(FedProx):
    def correct(self, gradient, weights, local):
        return gradient + weights


def test_a_part_that_returns_what_it_should_change_is_named():
    local = LocalRound(torch.zeros(2), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"`Returning.correct` returned a `Tensor`, which would be lost\."):
        Combined([FedProx(), Returning()]).correct(torch.ones(2), torch.ones(2), local)
