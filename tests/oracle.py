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
