import csv
import math

import mpmath
import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_feddua import ConfigurationError, FedDuAServer, FedExP, Hypentropy, MirrorMap, PNorm, RoundUpdate
from lightning_feddua.cli import main
from lightning_feddua.servers.mirror_maps.root import MAX_EVALUATIONS, increasing_root
from tests.servers import oracle

# The maps under test with their oracles.
MAPS = {
    "PNorm(2)": (PNorm(2.0), oracle.PNorm(2.0)),
    "PNorm(1.5)": (PNorm(1.5), oracle.PNorm(1.5)),
    "PNorm(1.1)": (PNorm(1.1), oracle.PNorm(1.1)),
    "Hypentropy(1)": (Hypentropy(1.0), oracle.Hypentropy(1.0)),
    "Hypentropy(0.01)": (Hypentropy(0.01), oracle.Hypentropy(0.01)),
}


class OwnQuadratic(MirrorMap):
    """``½ xᵀ G x`` with a given diagonal, as a user would write it."""

    def __init__(self, g):
        self.g = torch.as_tensor(g)

    def grad_psi(self, w):
        return self.g * w

    def grad_phi(self, theta):
        return theta / self.g


class OwnPNorm(MirrorMap):
    """The p-norm map by its gradients alone: whole vectors, and a difference instead of a displacement."""

    def __init__(self, p):
        self.inner = PNorm(p)
        self.grad_psi, self.grad_phi = self.inner.grad_psi, self.inner.grad_phi

    def grad_psi(self, w): ...

    def grad_phi(self, theta): ...


class Bounded(MirrorMap):
    """∇φ stays within (−1, 1), so that h has an upper bound."""

    separable = True

    def grad_psi(self, w):
        return w.atanh()

    def grad_phi(self, theta):
        return theta.tanh()


def as_update(deltas):
    return RoundUpdate(torch.from_numpy(deltas.mean(0)), torch.from_numpy((deltas**2).sum(1)))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dim", [1, 7, 1000])
@pytest.mark.parametrize(
    "choices",
    [{}, {"beta1": 0.9}, {"eps_g": 0.5}, {"step_size": 0.3}, {"step_size": 0.3, "beta1": 0.9}],
    ids=str,
)
def test_maps_agree_with_oracle_over_20_rounds(name, dim, choices):
    ours, theirs = MAPS[name]
    server = FedDuAServer(mirror_map=ours, **choices)
    known = {"eta" if key == "step_size" else key: value for key, value in choices.items()}
    reference = oracle.MirrorServer(theirs, **known)
    rng = np.random.default_rng(dim)
    w = rng.standard_normal(dim)
    w[::3] = 0
    weights = torch.from_numpy(w.copy())
    for _ in range(20):
        deltas = rng.standard_normal((4, dim)) * np.exp(rng.standard_normal(dim)) / dim**0.5
        deltas[:, rng.random(dim) < 0.2] = 0
        if not deltas.any():
            continue
        w, eta = reference.step(w, deltas)
        assert server.step(weights, as_update(deltas)) == pytest.approx(eta, rel=1e-9)
        np.testing.assert_allclose(weights.numpy(), w, rtol=1e-9, atol=1e-10 * np.abs(w).max())


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_two_norm_is_the_identity(beta1):
    a = torch.randn(500, dtype=torch.float64)
    b = a.clone()
    p_norm, identity = FedDuAServer(mirror_map=PNorm(2.0), beta1=beta1), FedDuAServer("identity", beta1=beta1)
    for t in range(20):
        deltas = np.random.default_rng(t).standard_normal((3, 500))
        assert p_norm.step(a, as_update(deltas)) == pytest.approx(identity.step(b, as_update(deltas)), rel=1e-12)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "choices", [{}, {"eps_g": 3.0}, {"beta1": 0.9, "eps_g": 0.1, "bias_correction": True}], ids=str
)
def test_numerical_inverse_is_the_closed_form_for_a_quadratic(choices):
    """In coordinates scaled by √G the closed form of the identity rule is that of any quadratic."""
    rng = np.random.default_rng(0)
    g = np.exp(rng.standard_normal(50))
    mapped, identity = FedDuAServer(mirror_map=OwnQuadratic(g), **choices), FedDuAServer("identity", **choices)
    a = torch.from_numpy(rng.standard_normal(50))
    b = a * torch.from_numpy(g).sqrt()
    for _ in range(10):
        deltas = rng.standard_normal((3, 50))
        update = as_update(deltas)
        scaled = RoundUpdate(torch.from_numpy(deltas.mean(0) / np.sqrt(g)), update.squared_norms)
        assert mapped.step(a, update) == pytest.approx(identity.step(b, scaled), rel=1e-10)
        torch.testing.assert_close(a * torch.from_numpy(g).sqrt(), b, rtol=1e-10, atol=1e-12)


def exact_h(mirror_map, w, v, eta):
    """``⟨∇φ(∇ψ(w) + η v) − w, v⟩`` as it is defined, in 60 digits."""
    w, v, eta = [mpmath.mpf(x) for x in w], [mpmath.mpf(x) for x in v], mpmath.mpf(eta)
    if isinstance(mirror_map, Hypentropy):
        beta = mpmath.mpf(mirror_map.beta)
        moved = [beta * mpmath.sinh(mpmath.asinh(a / beta) + eta * b) for a, b in zip(w, v, strict=True)]
    else:

        def gradient(x, r):
            total = mpmath.fsum(abs(a) ** r for a in x)
            return [total ** (2 / r - 1) * mpmath.sign(a) * abs(a) ** (r - 1) for a in x] if total else x

        p = mpmath.mpf(mirror_map.p)
        moved = gradient([a + eta * b for a, b in zip(gradient(w, p), v, strict=True)], p / (p - 1))
    return mpmath.fsum((a - b) * c for a, b, c in zip(moved, w, v, strict=True))


@pytest.mark.parametrize(
    "make", [lambda x: Hypentropy(10**x), lambda x: PNorm(1 + 10 ** (-abs(x) / 2))], ids=["Hypentropy", "PNorm"]
)
def test_steps_are_accurate_for_m_from_1e_minus_20_to_1e20(make):
    """Also where an update is far below the last digit of the weights."""
    rng = np.random.default_rng(0)
    evaluations = []
    for _ in range(150):
        mirror_map = make(rng.uniform(-5, 5))
        dim = rng.integers(1, 20)
        w, v = (rng.standard_normal(dim) * 10 ** rng.uniform(low, 3) for low in (-6, -9))
        w[rng.random(dim) < rng.choice([0, 0.2, 1])] = 0
        m = 10 ** rng.uniform(-20, 20)
        line = mirror_map.line(torch.from_numpy(w), torch.from_numpy(v))
        h, points = line.h, []
        line.h = lambda eta, h=h, points=points: points.append(eta) or h(eta)
        eta = line.solve(m, eps_g=0.0, guess=m / (v @ v))
        with mpmath.workdps(60):
            assert abs(exact_h(mirror_map, w, v, eta) / m - 1) < 1e-10
        evaluations.append(len(points))
    assert max(evaluations) <= 30
    assert np.mean(evaluations) < 12


FUNCTIONS = {
    "power": lambda eta, a: np.float64(eta) ** a,
    "exponential": lambda eta, a: np.expm1(np.float64(eta) * a),
    "nan beyond": lambda eta, a: np.sinh(np.float64(eta) * a) if eta < 100 / a else np.nan,
    "logarithm": lambda eta, a: a * np.log1p(np.float64(eta)),
    "stairs": lambda eta, a: np.floor(np.float64(eta) * 1e3) / 1e3,
}


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FUNCTIONS)), st.floats(0.1, 10), st.floats(-20, 20), st.floats(-30, 30))
@pytest.mark.filterwarnings("ignore:overflow")
def test_root_of_functions_of_all_kinds(name, a, log_target, log_guess):
    h, target, points = FUNCTIONS[name], 10**log_target, []
    root = increasing_root(lambda eta: points.append(eta) or float(h(eta, a)), target, 10**log_guess)
    assert len(points) <= MAX_EVALUATIONS
    if name == "logarithm" and target > a * 690:
        assert root is None
    elif name == "stairs":
        assert root is None or root == min(points, key=lambda eta: abs(math.log(max(h(eta, a), 1e-300) / target)))
    else:
        assert h(root, a) == pytest.approx(target, rel=1e-10)


@pytest.mark.parametrize("mirror_map", [Hypentropy(0.1), PNorm(1.3)], ids=str)
def test_pieces_give_what_the_whole_gives(mirror_map, monkeypatch):
    a = torch.randn(1000, dtype=torch.float64)
    b = a.clone()
    whole, pieces = FedDuAServer(mirror_map=mirror_map), FedDuAServer(mirror_map=mirror_map)
    for _ in range(3):
        update = as_update(torch.randn(4, 1000, dtype=torch.float64).numpy())
        eta = whole.step(a, update)
        with monkeypatch.context() as patch:
            patch.setattr("lightning_feddua.vectors._CHUNK", 64)
            assert pieces.step(b, update) == pytest.approx(eta, rel=1e-11)
            assert max(len(v) for _, _, v in mirror_map.line(b, update.mean_delta)._pieces()) == 64
    torch.testing.assert_close(a, b, rtol=1e-10, atol=0)


@pytest.mark.parametrize("separable", [True, False])
def test_only_separable_maps_are_given_pieces(separable, monkeypatch):
    monkeypatch.setattr("lightning_feddua.vectors._CHUNK", 64)
    lengths = set()

    class Watched(Hypentropy):
        def grad_psi(self, w):
            lengths.add(len(w))
            assert w.dtype == torch.float64
            return super().grad_psi(w)

    Watched.separable = separable
    FedDuAServer(mirror_map=Watched()).step(torch.zeros(200), RoundUpdate(torch.randn(200), torch.ones(2)))
    assert lengths == ({64, 8} if separable else {200})


def test_a_map_needs_no_more_than_its_two_gradients():
    a = torch.randn(30, dtype=torch.float64)
    b = a.clone()
    shipped, own = FedDuAServer(mirror_map=PNorm(1.4), beta1=0.5), FedDuAServer(mirror_map=OwnPNorm(1.4), beta1=0.5)
    for _ in range(10):
        update = as_update(torch.randn(3, 30, dtype=torch.float64).numpy())
        assert own.step(b, update) == pytest.approx(shipped.step(a, update), rel=1e-9)
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MAPS)
def test_float32_weights_are_moved_in_float64(name):
    ours, theirs = MAPS[name]
    server, reference = FedDuAServer(mirror_map=ours, beta1=0.9), oracle.MirrorServer(theirs, beta1=0.9)
    weights = torch.randn(1000)
    w = weights.double().numpy()
    for t in range(20):
        deltas = np.random.default_rng(t).standard_normal((3, 1000)).astype(np.float32)
        w, eta = reference.step(w, deltas.astype(float))
        update = RoundUpdate(torch.from_numpy(deltas.mean(0)), torch.from_numpy((deltas.astype(float) ** 2).sum(1)))
        assert server.step(weights, update) == pytest.approx(eta, rel=1e-4)
    np.testing.assert_allclose(weights.numpy(), w, rtol=1e-4, atol=1e-4 * np.abs(w).max())


def test_state_continues_bit_for_bit():
    updates = [as_update(np.random.default_rng(t).standard_normal((3, 20))) for t in range(6)]
    whole, first, second = (FedDuAServer(mirror_map=Hypentropy(), beta1=0.9) for _ in range(3))
    a, b = torch.zeros(2, 20).unbind()
    for update in updates:
        whole.step(a, update)
    for update in updates[:3]:
        first.step(b, update)
    second.load_state_dict(first.state_dict())
    for update in updates[3:]:
        second.step(b, update)
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("choices", "start", "message"),
    [
        (
            {"mirror_map": Bounded()},
            0.5,
            r"`Bounded\(\)` no step reaches h\(η\) = m = 50: .* give a constant `step_size`\.",
        ),
        ({"mirror_map": Bounded()}, 2.0, r"`Bounded\(\)` has no finite ∇ψ at the present weights\. Use a map"),
        ({"mirror_map": Bounded(), "step_size": 1.0}, 2.0, r"`Bounded\(\)` has no finite ∇ψ"),
        (
            {"mirror_map": Hypentropy(0.1), "step_size": 200.0},
            0.5,
            r"step of 200 .*`Hypentropy\(beta=0.1\)` .* float32\.",
        ),
        ({"mirror_map": Hypentropy(0.1), "step_size": 2000.0}, 0.5, r"Give a smaller `step_size`"),
    ],
)
def test_a_step_that_cannot_be_made_leaves_the_weights(choices, start, message):
    weights = torch.full((3,), start)
    with pytest.raises(ConfigurationError, match=message):
        FedDuAServer(**choices).step(weights, RoundUpdate(torch.ones(3), torch.tensor([100.0])))
    assert torch.equal(weights, torch.full((3,), start))


def test_eps_g_makes_any_m_reachable():
    weights = torch.zeros(1, dtype=torch.float64)
    update = RoundUpdate(torch.ones(1, dtype=torch.float64), torch.tensor([100.0]))
    eta = FedDuAServer(mirror_map=Bounded(), eps_g=0.1).step(weights, update)
    assert math.tanh(eta) + 0.1 * eta == pytest.approx(50, rel=1e-10)


@pytest.mark.parametrize("step_size", ["adaptive", 1.0])
def test_an_update_that_is_not_finite_moves_nothing_and_is_seen(step_size):
    weights = torch.ones(2)
    server = FedDuAServer(mirror_map=PNorm(), step_size=step_size)
    assert math.isnan(server.step(weights, RoundUpdate(torch.tensor([1.0, math.nan]), torch.ones(1))))
    assert torch.equal(weights, torch.ones(2))


def test_a_vanishing_update_leaves_the_weights_and_says_so():
    weights = torch.ones(2)
    with pytest.warns(UserWarning, match="weights stay"):
        assert FedDuAServer(mirror_map=PNorm()).step(weights, RoundUpdate(torch.zeros(2), torch.ones(2))) == 0
    assert torch.equal(weights, torch.ones(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PNorm(1.0), r"`p=1.0` lies outside \(1, 2\]\. Choose"),
        (lambda: PNorm(2.5), r"`p=2.5` lies outside"),
        (lambda: PNorm(math.nan), r"`p=nan` lies outside"),
        (lambda: Hypentropy(0.0), r"`beta=0.0` is not positive\. Give"),
        (lambda: Hypentropy(math.inf), r"`beta=inf` is not"),
        (lambda: FedDuAServer("adam", mirror_map=PNorm()), r"`preconditioner=adam` .* `PNorm\(p=1.5\)`\. Leave one"),
        (lambda: FedDuAServer(mirror_map=PNorm(), min_step=1.0), r"`min_step=1.0`"),
        (lambda: FedDuAServer(mirror_map="PNorm"), r"The mirror map is `'PNorm'`\. Give an instance of `MirrorMap`"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_preconditioner_is_adagrad_unless_there_is_a_map():
    assert FedDuAServer().preconditioner == "adagrad"
    assert FedDuAServer(mirror_map=PNorm()).preconditioner == "identity"
    assert FedDuAServer("identity", mirror_map=PNorm()).mirror_map.p == 1.5
    assert FedExP().mirror_map is None


@pytest.mark.parametrize("how", ["recipe", "options"])
def test_maps_from_recipes_and_the_command_line(tmp_path, how):
    recipe = {
        "model": {"class_path": "lightning_feddua.models.LinearRegression", "init_args": {"dim": 30}},
        "data": {"class_path": "SyntheticRegression", "init_args": {"dim": 30, "num_clients": 5}},
        "loop": {"max_rounds": 5, "local_steps": 5, "precision": "64-true", "out_dir": str(tmp_path)},
    }
    options = ["--server", "FedDuAServer", "--server.mirror_map", "Hypentropy", "--server.mirror_map.beta", "0.2"]
    if how == "recipe":
        mirror_map = {"class_path": "lightning_feddua.Hypentropy", "init_args": {"beta": 0.2}}
        recipe["server"] = {"class_path": "FedDuAServer", "init_args": {"mirror_map": mirror_map}}
        options = []
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["fit", "--config", str(tmp_path / "recipe.yaml"), *options]) == 0

    resolved = yaml.safe_load((tmp_path / "version_0/recipe.yaml").read_text())["server"]["init_args"]["mirror_map"]
    assert resolved == {"class_path": "lightning_feddua.Hypentropy", "init_args": {"beta": 0.2}}
    rows = list(csv.DictReader((tmp_path / "version_0/metrics.csv").open()))
    assert float(rows[-1]["val_loss"]) < float(rows[0]["val_loss"])
    # The step is set from the data, so validation is of the averaged iterates, too.
    assert rows[-1]["last_iterate/val_loss"] != rows[-1]["val_loss"]
