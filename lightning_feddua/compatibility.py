"""Whether a run has what a client algorithm needs; if not, one clear error before training says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_feddua.clients.local_training import LocalTraining
from lightning_feddua.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_feddua.host.federation import Federation


def check_algorithm(
    algorithm: LocalTraining, federation: Federation, cohort_size: int, local_steps: int | None, engine: Any
) -> None:
    """Compare what an algorithm needs with the module, its optimizer and the loop's settings.

    Args:
        algorithm: what clients do.
        federation: the module and its clients, with optimizers.
        cohort_size: how many clients take part in a round.
        local_steps: the loop's setting.
        engine: the engine that the user asked for.
    """
    for part in algorithm.parts:
        _check_part(part, federation, cohort_size, local_steps, engine)


def _check_part(
    algorithm: LocalTraining, federation: Federation, cohort_size: int, local_steps: int | None, engine: str
) -> None:
    name, module = type(algorithm).__name__, type(federation.module).__name__
    population = len(federation.client_ids)
    if engine == "vectorized" and not algorithm.supports_vectorized:
        raise ConfigurationError(f"`{name}` cannot run vectorized.", 'Use `engine="sequential"` or "auto".')
    if algorithm.touches_steps and not federation.module.automatic_optimization:
        raise ConfigurationError(
            f"`{name}` changes local steps, and `{module}` makes them itself (`automatic_optimization = False`).",
            "Use plain `LocalTraining`, or let `training_step` return the loss.",
        )
    if (algorithm.needs_full_gradient or algorithm.needs_mean_gradient) and federation.datamodule.has_streams:
        raise ConfigurationError(
            f"`{name}` needs the gradient over all samples of a client, and some clients are DataLoaders or streams.",
            "Give map-style datasets, or choose another `client` algorithm.",
        )
    if algorithm.needs_all_clients and cohort_size < population:
        raise ConfigurationError(
            f"`{name}` needs all {population} clients in each round, and"
            + (f" {cohort_size} take part." if cohort_size else " the sampler does not say how many take part."),
            "Set `clients_per_round` to None, or define `size` in the sampler.",
        )
    if algorithm.needs_local_steps and local_steps is None:
        raise ConfigurationError(
            f"`{name}` needs the same number of local steps of all clients, and `local_epochs` was given.",
            "Give `local_steps` instead.",
        )
    if algorithm.needs_anchor_gradient and federation.work.accumulate > 1:
        raise ConfigurationError(
            f"`{name}` compares each step's gradient with that at the global weights, and"
            f" `accumulate_grad_batches={federation.work.accumulate}` makes a step of several minibatches.",
            "Use `accumulate_grad_batches=1` and a larger `batch_size`.",
        )
    if algorithm.needs_constant_lr and (reason := _varying_lr(federation)) is not None:
        raise ConfigurationError(
            f"`{name}` needs local steps of the same known size, and `{module}` {reason}.",
            "Return a `torch.optim.SGD` with one learning rate, without momentum and scheduler.",
        )


def check_unequal(algorithm: LocalTraining) -> None:
    """Raise one clear error for an algorithm that needs each client's update, unchanged, in each round."""
    for part in algorithm.parts:
        if part.needs_all_clients:
            raise ConfigurationError(
                f"`{type(part).__name__}` needs all clients as they are in each round, and clients that fail would be"
                " left out or long updates clipped.",
                'Use `on_client_error="raise"` and `max_update_norm=None`.',
            )


def _varying_lr(federation: Federation) -> str | None:
    """Why a local step is not the gradient times one constant, as part of a sentence; None if it is."""
    optimizers = federation.optimizers
    optimizer = optimizers.optimizers[0]
    if type(optimizer) is not torch.optim.SGD:
        return f"uses `{type(optimizer).__name__}`"
    if any(group["momentum"] != 0 for group in optimizer.param_groups):
        return "uses SGD with momentum"
    if any(group["maximize"] for group in optimizer.param_groups):
        return "uses SGD with `maximize=True`"
    if len({float(group["lr"]) for group in optimizer.param_groups}) > 1:
        return "has several learning rates"
    if optimizers.schedulers:
        return "has a learning-rate scheduler"
    return None
