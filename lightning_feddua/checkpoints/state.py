"""What a checkpoint holds: an ordinary Lightning checkpoint, with the state of the federated run under one more key."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning
import numpy as np
import torch
from lightning import LightningModule
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_feddua._private import hparams_name, metadata_of, set_metadata
from lightning_feddua.checkpoints.files import FEDERATED, FORMAT, Found
from lightning_feddua.checkpoints.identity import check_identity
from lightning_feddua.checkpoints.loggers import logger_positions, resume_loggers
from lightning_feddua.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_feddua.host.federation import Federation
    from lightning_feddua.loop import FederatedLoop

_SAFE = (bool, int, float, str, bytes, type(None), Tensor, torch.dtype, torch.device, torch.Size)


def capture(loop: FederatedLoop) -> dict[str, Any]:
    """The state of a run between two rounds, when the module holds the global weights. Tensors are not copied.

    Every rank calls this, because the parts of a run may keep something on each; rank 0 writes it.

    Raises:
        ConfigurationError: something in it could not be loaded again without running code.
    """
    federation, run = loop._federation, loop.run
    assert federation is not None
    module, rounds = federation.module, len(run.history)
    # The module's parameters are windows on one vector, so that these weights take no room of their own in the file.
    own_precision = federation.parameters.vector.dtype == run.known_weights.dtype
    weights = federation.parameters.vector if own_precision else run.known_weights
    state_dict = module.state_dict()
    checkpoint: dict[str, Any] = {
        "epoch": rounds,
        "global_step": rounds,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": state_dict,
        **_hyper_parameters(module),
        FEDERATED: {
            "format": FORMAT,
            "identity": loop.identity,
            "engine": loop.backend.engine_name,
            **run.state_dict(),
            "weights": weights,
            # All of them; a state dict leaves out those that are not persistent.
            "buffers": dict(module.named_buffers()),
            "parts": {name: part.state_dict() for name, part in _parts(loop).items()},
            "loggers": logger_positions(loop.fabric),
        },
    }
    if run.average is not None:
        averaged = dict(federation.parameters.named_views(module, run.average))
        checkpoint["averaged_state_dict"] = {**state_dict, **{k: v for k, v in averaged.items() if k in state_dict}}
    module.on_save_checkpoint(checkpoint)
    return {key: _plain(value, key) for key, value in checkpoint.items()}


def restore(loop: FederatedLoop, federation: Federation, found: Found) -> None:
    """Bring a run to the state of a checkpoint, or say in one sentence what keeps it from there."""
    state, run = found.state, loop.run
    check_identity(state["identity"], loop.identity, found.path)
    rounds = len(state["history"])
    if rounds > loop.max_rounds:
        raise ConfigurationError(
            f"The checkpoint `{found.path}` has {rounds} rounds, more than `max_rounds={loop.max_rounds}`.",
            "Ask for as many rounds at least, or start afresh.",
        )
    federation.module.on_load_checkpoint(found.checkpoint)
    federation.load(found.checkpoint["state_dict"], state["buffers"])
    _check_order(federation, state, found)
    run.load_state_dict(state)
    run.round = rounds
    federation.restore(run.known_weights)
    parts = _parts(loop)
    for name, part in parts.items():
        if name in state["parts"]:
            part.load_state_dict(state["parts"][name])
    for name in state["parts"].keys() - parts.keys():
        # The package's own callbacks report on a run, and do not steer it.
        if state["parts"][name] and not name.startswith(__name__.partition(".")[0]):
            rank_zero_warn(f"The checkpoint `{found.path}` has a state of `{name}`, which this run does not have.")
    resume_loggers(loop.fabric, state["loggers"] if found.run_dir is not None else [])


def _check_order(federation: Federation, state: dict[str, Any], found: Found) -> None:
    """One clear error where a checkpoint that does not say so has its weights in another memory format."""
    vector, saved = federation.parameters.vector, state["weights"]
    known = "channels_last" in state["identity"]["settings"]
    if not known and not torch.equal(vector.cpu(), saved.to(vector.dtype)):
        raise ConfigurationError(
            f"The checkpoint `{found.path}` belongs to another run: its weights have another memory format.",
            "Resume with the `channels_last` that it was saved with, or start afresh.",
        )


def results_of(loop: FederatedLoop) -> dict[str, Any]:
    """The states of a run's parts after a fit, but for what clients keep, for the parent of forked ranks."""
    parts = {name: part.state_dict() for name, part in _parts(loop).items() if part is not loop.backend}
    return {name: _plain(value, name) for name, value in parts.items()}


def take_results(loop: FederatedLoop, states: dict[str, Any]) -> None:
    """Give a loop the states that :func:`results_of` has found elsewhere."""
    for name, part in _parts(loop).items():
        if name in states:
            part.load_state_dict(states[name])


def _parts(loop: FederatedLoop) -> dict[str, Any]:
    """The objects of a run that have a state of their own, by name."""
    parts: dict[str, Any] = {"server": loop.server, "client": loop.client, "client states": loop.backend}
    parts |= {f"transform {place}": transform for place, transform in enumerate(loop.transforms or [])}
    for callback in loop.callbacks:
        if callback is not loop.server:
            name = f"{type(callback).__module__}.{type(callback).__qualname__}"
            of_its_class = sum(known.rpartition(" ")[0] == name for known in parts)
            parts[f"{name} {of_its_class}"] = callback
    return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}


def _hyper_parameters(module: LightningModule) -> dict[str, Any]:
    """The module's hyperparameters under the keys that ``load_from_checkpoint`` reads, where they are plain values."""
    if not module.hparams:
        return {}
    kept = {}
    for name, value in dict(module.hparams).items():
        try:
            kept[name] = _plain(value, name)
        except ConfigurationError:
            rank_zero_warn(
                f"The hyperparameter `{name}` is a `{type(value).__name__}` and is not kept in checkpoints."
                f" Give it to `load_from_checkpoint` as an argument."
            )
    names = {module.CHECKPOINT_HYPER_PARAMS_NAME: hparams_name(module)}
    return {module.CHECKPOINT_HYPER_PARAMS_KEY: kept, **{key: name for key, name in names.items() if name}}


def _plain(value: Any, where: str) -> Any:
    """A value made of what `torch.load` takes without running code; tensors are passed on as they are."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) in _SAFE or isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        items = {_plain(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
        metadata = metadata_of(value)
        if metadata is None:
            return items
        # A state dict, with the versions of its modules in an attribute.
        state_dict = OrderedDict(items)
        set_metadata(state_dict, metadata)
        return state_dict
    if isinstance(value, list | tuple | set):
        kind = next(kind for kind in (list, tuple, set) if isinstance(value, kind))
        return kind(_plain(item, f"{where}.{i}") for i, item in enumerate(value))
    raise ConfigurationError(
        f"`{where}` is a `{type(value).__name__}`, which a checkpoint cannot hold: loading it could run code.",
        "Keep it as tensors and plain values.",
    )
