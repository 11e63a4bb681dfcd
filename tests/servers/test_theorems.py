"""The paper's three theorems on the step, as properties of what the server does to weights.

Notation as in the paper: the approximate projection condition (A.P.C.) says ``⟨Δ̄, w* − w⟩ ≥ m``, and ψ is that of the
round: under Adagrad it changes with s.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_feddua import FedDuAServer, Hypentropy, PNorm, RoundUpdate
from tests.servers import oracle

GEOMETRIES = {
    "adagrad": ({"preconditioner": "adagrad"}, None),
    "p-norm 1.5": ({"mirror_map": PNorm(1.5)}, oracle.PNorm(1.5)),
    "p-norm 1.1": ({"mirror_map": PNorm(1.1)}, oracle.PNorm(1.1)),
    "hypentropy 1": ({"mirror_map": Hypentropy(1.0)}, oracle.Hypentropy(1.0)),
    "hypentropy 0.1": ({"mirror_map": Hypentropy(0.1)}, oracle.Hypentropy(0.1)),
}
geometries = pytest.mark.parametrize("geometry", GEOMETRIES)
cases = given(seed=st.integers(0, 2**32 - 1), dim=st.integers(2, 20), clients=st.integers(1, 8))
reproducible = settings(max_examples=20, deadline=None, derandomize=True)


def step(server, w, deltas):
    """``(w_{t+1}, η)`` of a round."""
    weights = torch.from_numpy(w.copy())
    eta = server.step(weights, RoundUpdate(torch.from_numpy(deltas.mean(0)), torch.from_numpy((deltas**2).sum(1))))
    return weights.numpy(), eta


def round_map(server, geometry):
    """The mirror map of the round that the server has just made."""
    known = GEOMETRIES[geometry][1]
    return known if known is not None else oracle.Quadratic(server.state_dict()["s"].numpy() ** 0.5 + server.eps)


def rounds(geometry, seed, dim, clients):
    """Three rounds of arbitrary updates: ``(rng, map, deltas, w_t, w_{t+1}, η)`` of each."""
    rng = np.random.default_rng(seed)
    server = FedDuAServer(**GEOMETRIES[geometry][0])
    w = rng.standard_normal(dim)
    for _ in range(3):
        deltas = rng.standard_normal((clients, dim)) * rng.uniform(0.1, 1) + rng.standard_normal(dim)
        moved, eta = step(server, w, deltas)
        yield rng, round_map(server, geometry), deltas, w, moved, eta
        w = moved


def solutions(rng, deltas, w, slacks):
    """Points w* with ``⟨Δ̄, w* − w⟩ = (1 + slack) m``, which satisfy A.P.C."""
    mean, m = deltas.mean(0), 0.5 * (deltas**2).sum(1).mean()
    found = []
    for slack in slacks:
        sideways = rng.standard_normal(len(w)) * rng.uniform(0, 3)
        sideways -= mean * (sideways @ mean) / (mean @ mean)
        found.append(w + (1 + slack) * m / (mean @ mean) * mean + sideways)
        assert ((w + deltas - found[-1]) ** 2).sum(1).mean() <= ((w - found[-1]) ** 2).sum() * (1 + 1e-12)
    return found


@geometries
@reproducible
@cases
def test_theorem_1_no_solution_gets_farther_away(geometry, seed, dim, clients):
    for rng, mirror_map, deltas, w, moved, eta in rounds(geometry, seed, dim, clients):
        m = 0.5 * (deltas**2).sum(1).mean()
        for w_star in solutions(rng, deltas, w, [0.0, 0.1, 1.0, 10.0]):
            before, after = oracle.bregman(mirror_map, w_star, w), oracle.bregman(mirror_map, w_star, moved)
            assert after < before
            # The best step for this w*, where h = ⟨w* − w, Δ̄⟩ ≥ m, is no shorter, so that a shorter one does worse.
            shorter = mirror_map.grad_phi(mirror_map.grad_psi(w) + 0.99 * eta * deltas.mean(0))
            assert after <= oracle.bregman(mirror_map, w_star, shorter) + 1e-12 * (before + m)


@geometries
@reproducible
@cases
def test_theorem_3_the_step_is_the_unique_minimiser_of_the_worst_case(geometry, seed, dim, clients):
    for rng, mirror_map, deltas, w, moved, eta in rounds(geometry, seed, dim, clients):
        w_stars = solutions(rng, deltas, w, [0.0, 0.0, 1.0])

        def excess(point, w_star, w=w, mirror_map=mirror_map):
            return oracle.bregman(mirror_map, w_star, point) - oracle.bregman(mirror_map, w_star, w)

        # On the line θ + λ Δ̄ the worst case is finite; a line search over λ finds FedDuA's step, and no other.
        theta, mean = mirror_map.grad_psi(w), deltas.mean(0)
        factors = np.linspace(0, 3, 61)
        line = [mirror_map.grad_phi(theta + factor * eta * mean) for factor in factors]
        worst = np.array([max(excess(point, w_star) for w_star in w_stars) for point in line])
        best = worst.argmin()
        assert factors[best] == pytest.approx(1)
        assert (worst > worst[best]).sum() == len(worst) - 1
        np.testing.assert_allclose(line[best], moved, rtol=1e-9, atol=1e-9)

        # Off the line some solution, far enough along the hyperplane of A.P.C., is worse than that.
        point = moved + rng.standard_normal(dim) * 0.1
        slope = theta - mirror_map.grad_psi(point)
        slope -= mean * (slope @ mean) / (mean @ mean)
        shortfall = max(worst[best] - excess(point, w_stars[0]), 0) + 1
        assert excess(point, w_stars[0] + shortfall / (slope @ slope) * slope) > worst[best]


@geometries
@reproducible
@given(seed=st.integers(0, 2**32 - 1), dim=st.integers(4, 20), beta1=st.floats(0, 0.95))
def test_theorem_2_momentum_keeps_its_lower_bound_under_exact_projections(geometry, seed, dim, beta1):
    """Clients project on affine subspaces that share w*, which is strong A.P.C."""
    rng = np.random.default_rng(seed)
    w_star, w = rng.standard_normal((2, dim))
    bases = [np.linalg.qr(rng.standard_normal((dim, 2)))[0] for _ in range(5)]
    server = FedDuAServer(**GEOMETRIES[geometry][0], beta1=beta1)
    for _ in range(10):
        deltas = np.array([basis @ (basis.T @ (w_star - w)) for basis in bases])
        moved, _ = step(server, w, deltas)
        state = server.state_dict()
        m = state["m"]
        v = state["v"].numpy() if beta1 else deltas.mean(0)
        tolerance = 1e-9 * (m + np.linalg.norm(w_star - w) * np.linalg.norm(v))
        assert (w_star - w) @ v >= 2 * m - tolerance
        assert 2 * m >= m > 0
        w = moved
