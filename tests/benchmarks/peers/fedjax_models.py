"""The benchmark's models in JAX, with torch's shapes and order of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Params = dict[str, Array]
Loss = Callable[[Params, Array, Array], Array]

# The parameters of each task, in torch's order.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "linear": {"weight": (1, 1000)},
    "mlp": {"w1": (200, 784), "b1": (200,), "w2": (62, 200), "b2": (62,)},
    "cnn": {
        "k1": (32, 1, 3, 3),
        "c1": (32,),
        "k2": (64, 32, 3, 3),
        "c2": (64,),
        "w1": (128, 9216),
        "b1": (128,),
        "w2": (62, 128),
        "b2": (62,),
    },
    "lstm": {
        "embedding": (79, 256),
        **{
            f"{name}{layer}": shape
            for layer in (0, 1)
            for name, shape in {"wi": (1024, 256), "wh": (1024, 256), "bi": (1024,), "bh": (1024,)}.items()
        },
        "w": (79, 256),
        "b": (79,),
    },
}


def unflatten(task: str, weights: np.ndarray) -> Params:
    """A task's parameters from one vector."""
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in SHAPES[task].values()])
    parts = np.split(weights, ends[:-1])
    return {name: jnp.asarray(part.reshape(s)) for (name, s), part in zip(SHAPES[task].items(), parts, strict=True)}


def flatten(task: str, params: Params) -> np.ndarray:
    """The same backwards."""
    return np.concatenate([np.asarray(params[name]).reshape(-1) for name in SHAPES[task]])


def _linear_loss(p: Params, x: Array, y: Array) -> Array:
    return 0.5 * jnp.mean((x @ p["weight"].T - y) ** 2)


def _cross_entropy(logits: Array, y: Array) -> Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))


def _two_dense_layers(p: Params, x: Array, y: Array) -> Array:
    hidden = jax.nn.relu(x @ p["w1"].T + p["b1"])
    return _cross_entropy(hidden @ p["w2"].T + p["b2"], y)


def _cnn_loss(p: Params, x: Array, y: Array) -> Array:
    # Channels last, which is what XLA's convolutions on a CPU are made for.
    x = x.transpose(0, 2, 3, 1)
    for kernel, bias in (("k1", "c1"), ("k2", "c2")):
        x = lax.conv_general_dilated(x, p[kernel], (1, 1), "VALID", dimension_numbers=("NHWC", "OIHW", "NHWC"))
        x = jax.nn.relu(x + p[bias])
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return _two_dense_layers(p, x.transpose(0, 3, 1, 2).reshape(len(x), -1), y)


def _lstm_loss(p: Params, x: Array, y: Array) -> Array:
    sequence = p["embedding"][x].transpose(1, 0, 2)
    for layer in (0, 1):
        wh = p[f"wh{layer}"].T
        # The inputs' part of the gates for all times at once.
        gates = sequence @ p[f"wi{layer}"].T + (p[f"bi{layer}"] + p[f"bh{layer}"])

        def step(state: Any, gate: Array, wh: Array = wh) -> tuple[Any, Array]:
            h, c = state
            i, f, g, o = jnp.split(gate + h @ wh, 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((len(x), wh.shape[0]))
        _, sequence = lax.scan(step, (zeros, zeros), gates)
    return _cross_entropy(sequence[-1] @ p["w"].T + p["b"], y)


LOSSES: dict[str, Loss] = {
    "linear": _linear_loss,
    "mlp": _two_dense_layers,
    "cnn": _cnn_loss,
    "lstm": _lstm_loss,
}
