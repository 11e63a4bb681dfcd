"""Callbacks of Lightning that cannot mean in a federated run what they mean under Trainer, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _accumulation(callback: Any) -> str:
    factors = dict(getattr(callback, "scheduling", {}))
    first = factors.get(0, next(iter(factors.values()), 2))
    return f"Use `FederatedLoop(accumulate_grad_batches={first})`, which is the same in all rounds."


def _last_iterates(callback: Any) -> str:
    return (
        "Use a rule with an adaptive step such as `FedDuAdam`, which validates the average of its last two iterates, or"
        " average `loop.weights` in `FederatedCallback.on_round_end`."
    )


def _says(sentence: str) -> Callable[[Any], str]:
    return lambda callback: sentence


# For each class, why it is refused, as the end of a sentence, and what to use instead.
REFUSED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "BaseFinetuning": (
        "unfreezes parameters during a fit, and the server needs the same ones in all rounds",
        _says(
            "Freeze them in the module's `__init__` with `requires_grad_(False)`, and unfreeze them before a second"
            " `loop.fit` of the same module."
        ),
    ),
    "BasePredictionWriter": (
        "writes what Trainer predicts",
        _says("Write what `loop.predict(model, datamodule)` returns."),
    ),
    "BatchSizeFinder": (
        "tries batch sizes on one device, and clients' minibatches decide the result",
        _says("Choose `FederatedDataModule(batch_size=…)`."),
    ),
    "DeviceStatsMonitor": (
        "logs at each step of one Trainer, and here many clients make steps at once",
        _says("Use a logger that records the machine, such as `FederatedLoop(loggers=WandbLogger())`."),
    ),
    "GradientAccumulationScheduler": ("counts the epochs of one Trainer, and each client starts again", _accumulation),
    "LearningRateFinder": (
        "tries learning rates on one client's steps, without the server",
        _says("Use `feddua sweep --space model.lr=log:0.001:1:5`, which runs whole rounds."),
    ),
    "ModelPruning": (
        "replaces parameters during a fit, and the server needs the same ones in all rounds",
        _says("Prune the module with `torch.nn.utils.prune` before or after `loop.fit`."),
    ),
    "OnExceptionCheckpoint": (
        "saves in the middle of a round, from where a run cannot be resumed",
        _says("Use `FederatedLoop(checkpoint_every=1)`, which keeps the last whole round."),
    ),
    "SpikeDetection": (
        "watches the loss over all steps, and here it starts again in each client",
        _says('Use `FederatedLoop(on_client_error="skip", max_update_norm=…)`.'),
    ),
    "StochasticWeightAveraging": (
        "averages the weights of a client's epochs, before they are summed",
        _last_iterates,
    ),
    "ThroughputMonitor": (
        "times the steps of one Trainer",
        _says("Use the `seconds` of each round in `loop.history`."),
    ),
    "WeightAveraging": ("averages the weights of a client's steps, before they are summed", _last_iterates),
}
