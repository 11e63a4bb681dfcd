"""The server rules and local gradient descent once more, in NumPy and float64, from the equations alone."""

import numpy as np


class Server:
    """``w += η G⁻¹ v``, as printed."""

    def __init__(self, accumulator=None, eta=None, beta1=0.0, beta2=0.99, eps=0.0, eps_g=0.0, heavy_ball=False):
        self.accumulator, self.eta = accumulator, eta
        self.beta1, self.beta2, self.eps, self.eps_g, self.heavy_ball = beta1, beta2, eps, eps_g, heavy_ball
        self.s = self.v = self.m = 0.0

    def step(self, w, deltas, p=None):
        p = np.full(len(deltas), 1 / len(deltas)) if p is None else np.asarray(p) / np.sum(p)
        mean = p @ deltas
        self.v = self.beta1 * self.v + (1 if self.heavy_ball else 1 - self.beta1) * mean
        self.m = self.beta1 / 2 * self.m + (1 - self.beta1) * 0.5 * (p @ (deltas**2).sum(1))
        if self.accumulator == "adagrad":
            self.s = self.s + mean**2
        elif self.accumulator == "adam":
            self.s = self.beta2 * self.s + (1 - self.beta2) * mean**2
        elif self.accumulator == "yogi":
            self.s = self.s - (1 - self.beta2) * mean**2 * np.sign(self.s - mean**2)
        g = np.sqrt(self.s) + self.eps if self.accumulator else np.ones_like(w)
        direction = np.divide(self.v, g, out=np.zeros_like(w), where=g != 0)
        eta = self.eta
        if eta is None:
            denominator = (self.v * direction).sum() + self.eps_g
            eta = self.m / denominator if denominator else 0.0
        return w + eta * direction, eta


def gradient_descent_deltas(xs, ys, w, lr, steps):
    """Updates of clients after full-batch gradient steps on ``1/(2n) ‖Xw − y‖²``, in closed form."""
    deltas = []
    for x, y in zip(xs, ys, strict=True):
        eigenvalues, u = np.linalg.eigh(x @ x.T / len(y))
        # Σ_{k<τ} (1 − ηλ)^k, acting on the residual in sample space.
        series = sum((1 - lr * eigenvalues) ** k for k in range(steps))
        deltas.append(x.T @ (u @ (series * (u.T @ (y - x @ w)))) * lr / len(y))
    return np.array(deltas)


class Quadratic:
    """``ψ(x) = ½ xᵀ G x``, G diagonal."""

    def __init__(self, g):
        self.g = g

    def psi(self, x):
        return 0.5 * (self.g * x**2).sum()

    def grad_psi(self, x):
        return self.g * x

    def grad_phi(self, theta):
        return theta / self.g


class PNorm:
    """``ψ(x) = ½ ‖x‖_p²``."""

    def __init__(self, p):
        self.p = p

    def psi(self, x):
        return 0.5 * (np.abs(x) ** self.p).sum() ** (2 / self.p)

    def grad_psi(self, x, p=None):
        p = p or self.p
        norm = (np.abs(x) ** p).sum() ** (1 / p)
        return norm * np.sign(x) * (np.abs(x) / norm) ** (p - 1) if norm else np.zeros_like(x)

    def grad_phi(self, theta):
        return self.grad_psi(theta, self.p / (self.p - 1))


class Hypentropy:
    """``ψ(x) = Σ x asinh(x/β) − √(x² + β²)``."""

    def __init__(self, beta):
        self.beta = beta

    def psi(self, x):
        return (x * np.arcsinh(x / self.beta) - np.hypot(x, self.beta)).sum()

    def grad_psi(self, x):
        return np.arcsinh(x / self.beta)

    def grad_phi(self, theta):
        return self.beta * np.sinh(theta)


def bregman(mirror_map, x, y):
    """``D_ψ(x | y)``."""
    return mirror_map.psi(x) - mirror_map.psi(y) - mirror_map.grad_psi(y) @ (x - y)


class MirrorServer:
    """``w = ∇φ(∇ψ(w) + η v)``, where η is given or ``h(η) + ε_g η = m`` is solved by bisection."""

    def __init__(self, mirror_map, eta=None, beta1=0.0, eps_g=0.0):
        self.map, self.eta, self.beta1, self.eps_g = mirror_map, eta, beta1, eps_g
        self.v = self.m = 0.0

    def step(self, w, deltas):
        self.v = self.beta1 * self.v + (1 - self.beta1) * deltas.mean(0)
        self.m = self.beta1 / 2 * self.m + (1 - self.beta1) * 0.5 * (deltas**2).sum(1).mean()
        theta, v = self.map.grad_psi(w), self.v
        eta = self.eta
        if eta is None:
            low, high = 0.0, 1.0

            def short(eta):
                return (self.map.grad_phi(theta + eta * v) - w) @ v + self.eps_g * eta < self.m

            while short(high):
                high *= 2
            for _ in range(100):
                eta = (low + high) / 2
                low, high = (eta, high) if short(eta) else (low, eta)
        return self.map.grad_phi(theta + eta * v), eta
