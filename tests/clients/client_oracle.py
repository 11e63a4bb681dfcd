"""Client algorithms on least squares, in NumPy float64, written from the equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lightning_feddua.data.client_data import minibatches
from lightning_feddua.randomness import Purpose, generator
from lightning_feddua.sampling import sample_cohort

Vector = np.ndarray


@dataclass
class LeastSquares:
    """Clients with ``F_i(w) = 1/(2n) ‖X_i w − y_i‖²``."""

    X: list[np.ndarray]
    y: list[np.ndarray]

    @classmethod
    def random(cls, clients: int = 5, dim: int = 6, samples: int = 9, seed: int = 0, scale: float = 1.0):
        """Heterogeneous clients: each has a solution of its own."""
        rng = np.random.default_rng(seed)
        X = [rng.normal(size=(samples + i, dim)) for i in range(clients)]
        return cls(X, [x @ (rng.normal(size=dim) * scale + i) + 0.1 * rng.normal(size=len(x)) for i, x in enumerate(X)])

    def gradient(self, i: int, w: Vector, rows: np.ndarray | slice = slice(None)) -> Vector:
        """Of some of a client's samples."""
        X, y = self.X[i][rows], self.y[i][rows]
        return X.T @ (X @ w - y) / len(X)

    @property
    def dim(self) -> int:
        """d."""
        return self.X[0].shape[1]

    def optimum(self) -> Vector:
        """Of the mean of all ``F_i``."""
        hessian = np.mean([x.T @ x / len(x) for x in self.X], axis=0)
        moments = np.mean([x.T @ y / len(x) for x, y in zip(self.X, self.y, strict=True)], axis=0)
        return np.linalg.solve(hessian, moments)


@dataclass
class Run:
    """One run's settings."""

    problem: LeastSquares
    rounds: int
    cohort: int
    steps: int
    batch: int
    lr: float
    eta_g: float = 1.0

    def clients(self, round: int) -> list[int]:
        """The cohort of a round."""
        return sample_cohort(0, round, len(self.problem.X), self.cohort)

    def batches(self, round: int, i: int, steps: int | None = None) -> list[np.ndarray]:
        """The rows of a client's minibatches."""
        rng = generator(0, round, i, Purpose.MINIBATCHES)
        return [r for _, r in minibatches(len(self.problem.X[i]), self.batch, rng, steps=steps or self.steps)]


def soft(x: Vector, threshold: float) -> Vector:
    """The prox of ``threshold ‖x‖₁``."""
    return np.sign(x) * np.maximum(np.abs(x) - threshold, 0)


def plain(run: Run, correction: Callable[[Vector, Vector], Vector] = lambda w, anchor: 0 * w) -> Vector:
    """FedAvg, with something added to each gradient."""
    w = np.zeros(run.problem.dim)
    for t in range(run.rounds):
        ends = []
        for i in run.clients(t):
            x = w.copy()
            for rows in run.batches(t, i):
                x = x - run.lr * (run.problem.gradient(i, x, rows) + correction(x, w))
            ends.append(x)
        w = w + run.eta_g * (np.mean(ends, axis=0) - w)
    return w


def fedprox(run: Run, mu: float) -> Vector:
    """Li et al., 2020."""
    return plain(run, lambda w, anchor: mu * (w - anchor))


def scaffold(run: Run, option: str) -> tuple[Vector, Vector, np.ndarray]:
    """Karimireddy et al., 2020: weights, c and all c_i."""
    problem, clients = run.problem, len(run.problem.X)
    w, c, c_i = np.zeros(problem.dim), np.zeros(problem.dim), np.zeros((clients, problem.dim))
    for t in range(run.rounds):
        cohort, deltas, changes = run.clients(t), [], []
        for i in cohort:
            x = w.copy()
            for rows in run.batches(t, i):
                x = x - run.lr * (problem.gradient(i, x, rows) + c - c_i[i])
            new = problem.gradient(i, w) if option == "I" else c_i[i] - c - (x - w) / (run.steps * run.lr)
            deltas.append(x - w)
            changes.append(new - c_i[i])
            c_i[i] = new
        w = w + run.eta_g * np.mean(deltas, axis=0)
        c = c + len(cohort) / clients * np.mean(changes, axis=0)
    return w, c, c_i


def adaalter(run: Run, eps: float, initial: float) -> Vector:
    """Xie et al., 2019."""
    w, B2 = np.zeros(run.problem.dim), np.full(run.problem.dim, initial)
    for t in range(run.rounds):
        ends, A2 = [], []
        for i in run.clients(t):
            x, squares = w.copy(), B2.copy()
            for k, rows in enumerate(run.batches(t, i), start=1):
                g = run.problem.gradient(i, x, rows)
                squares = squares + g**2
                x = x - run.lr * g / np.sqrt(B2 + k * eps**2)
            ends.append(x)
            A2.append(squares)
        w, B2 = w + run.eta_g * (np.mean(ends, axis=0) - w), np.mean(A2, axis=0)
    return w


def mime(run: Run, statistics: str, beta1: float, beta2: float, eps: float, lite: bool) -> Vector:
    """Karimireddy et al., 2021."""
    problem = run.problem
    w, m, v = np.zeros(problem.dim), np.zeros(problem.dim), np.zeros(problem.dim)
    for t in range(run.rounds):
        cohort, ends = run.clients(t), []
        c = np.mean([problem.gradient(i, w) for i in cohort], axis=0)
        for i in cohort:
            y = w.copy()
            for rows in run.batches(t, i):
                g = problem.gradient(i, y, rows)
                if not lite:
                    g = g - problem.gradient(i, w, rows) + c
                if statistics != "none":
                    g = (1 - beta1) * g + beta1 * m
                if statistics == "adam":
                    g = g / (np.sqrt(v) + eps)
                y = y - run.lr * g
            ends.append(y)
        w = w + run.eta_g * (np.mean(ends, axis=0) - w)
        m, v = beta1 * m + (1 - beta1) * c, beta2 * v + (1 - beta2) * c**2
    return w


def scaffnew(run: Run, p: float) -> tuple[Vector, np.ndarray]:
    """Mishchenko et al., 2022: weights and all h_i."""
    problem, clients = run.problem, len(run.problem.X)
    w, h = np.zeros(problem.dim), np.zeros((clients, problem.dim))
    for t in range(run.rounds):
        steps, ends = int(generator(0, t, 0, Purpose.ROUND).geometric(p)), []
        for i in range(clients):
            x = w.copy()
            for rows in run.batches(t, i, steps):
                x = x - run.lr * (problem.gradient(i, x, rows) - h[i])
            ends.append(x)
        w = np.mean(ends, axis=0)
        h = h + p / run.lr * (w - np.array(ends))
    return w, h


def fedmid(run: Run, l1: float) -> Vector:
    """Yuan et al., 2021, in the primal space."""
    w = np.zeros(run.problem.dim)
    for t in range(run.rounds):
        ends = []
        for i in run.clients(t):
            x = w.copy()
            for rows in run.batches(t, i):
                x = soft(x - run.lr * run.problem.gradient(i, x, rows), run.lr * l1)
            ends.append(x)
        w = soft(w + run.eta_g * (np.mean(ends, axis=0) - w), run.eta_g * run.lr * run.steps * l1)
    return w


def feddualavg(run: Run, l1: float) -> Vector:
    """Yuan et al., 2021, in the dual space."""
    z = np.zeros(run.problem.dim)
    for t in range(run.rounds):
        ends, past = [], run.eta_g * run.lr * run.steps * t
        for i in run.clients(t):
            x = z.copy()
            for k, rows in enumerate(run.batches(t, i)):
                w = soft(x, (past + run.lr * k) * l1)
                x = x - run.lr * run.problem.gradient(i, w, rows)
            ends.append(x)
        z = z + run.eta_g * (np.mean(ends, axis=0) - z)
    return soft(z, run.eta_g * run.lr * run.steps * run.rounds * l1)
