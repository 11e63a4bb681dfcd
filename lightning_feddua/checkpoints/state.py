"""What a checkpoint holds: an ordinary Lightning checkpoint, with the state of the federated run under one more key."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import lightning
import numpy as np
import torch
from lightning import LightningModule
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_feddua._private import hparams_name, metadata_of, set_metadata
from lightning_feddua.checkpoints.files import AVERAGED, FEDERATED, FORMAT
from lightning_feddua.checkpoints.identity import moved_parts
from lightning_feddua.checkpoints.loggers import logger_positions
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.kept_metrics import metric_states

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop

_SAFE = (bool, int, float, str, bytes, type(None), Tensor, torch.dtype, torch.device, torch.Size)


def capture(loop: FederatedLoop, evaluated: set[bool], lenient: bool = False) -> dict[bool, dict[str, Any]]:
    """The state of a run between two rounds, when the module holds the global weights. Tensors are not copied.

    Every rank calls this, because the parts of a run may keep something on each; rank 0 writes it.

    Args:
        loop: the loop.
        evaluated: with which ``state_dict``s: True for the iterate that is validated, False for the weights. Both have
            the weights among what the run is resumed from.
        lenient: whether what a hook adds and a checkpoint cannot hold is left out, with a warning.

    Raises:
        ConfigurationError: something in it could not be loaded again without running code.
    """
    state = _federated_state(loop)
    found = {False: _checkpoint(loop, state, False, lenient)}
    if True in evaluated:
        found[True] = found[False] if loop.run.average is None else _checkpoint(loop, state, True, lenient)
    return found


def _federated_state(loop: FederatedLoop) -> dict[str, Any]:
    """What a run is resumed from, besides the module's own state; a collective."""
    federation, run = loop._federation, loop.run
    assert federation is not None
    # The module's parameters are windows on one vector, so that these weights take no room of their own in the file.
    own_precision = federation.parameters.vector.dtype == run.known_weights.dtype
    weights = federation.parameters.vector if own_precision else run.known_weights
    layout = federation.parameters.layout(federation.module)
    return {
        "format": FORMAT,
        "identity": loop.identity,
        "moved": moved_parts(loop.identity, federation),
        "engine": loop.backend.engine_name,
        **run.state_dict(),
        "history": run.history_text.encode(run.history, lambda row: _plain(row, "history")),
        "weights": layout.views(weights),
        "average": None if run.average is None else layout.views(run.average),
        # All of them; a state dict leaves out those that are not persistent.
        "buffers": dict(federation.module.named_buffers()),
        "moving": federation.buffers.parameter_names,
        "metrics": metric_states(federation.module),
        "parts": {name: part.state_dict() for name, part in parts_of(loop).items()},
        "loggers": logger_positions(loop.fabric),
    }


def _checkpoint(loop: FederatedLoop, state: dict[str, Any], evaluated: bool, lenient: bool) -> dict[str, Any]:
    federation, run = loop._federation, loop.run
    assert federation is not None
    module, rounds = federation.module, len(run.history)
    state_dict = module.state_dict()
    checkpoint: dict[str, Any] = {
        "epoch": rounds,
        "global_step": rounds,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": state_dict,
        "callbacks": federation.callbacks.state_dict(),
        **_hyper_parameters(module),
        FEDERATED: state,
    }
    if run.average is not None:
        named = dict(federation.parameters.named_views(module, run.average))
        averaged = {**state_dict, **{name: value for name, value in named.items() if name in state_dict}}
        checkpoint[AVERAGED] = averaged
        if evaluated:
            checkpoint["state_dict"] = OrderedDict(averaged)
            set_metadata(checkpoint["state_dict"], metadata_of(state_dict))
    own = checkpoint.keys() - {"callbacks", module.CHECKPOINT_HYPER_PARAMS_KEY}
    federation.callbacks.call("on_save_checkpoint", checkpoint)
    module.on_save_checkpoint(checkpoint)
    # What hooks put among the hyperparameters is no reason to end a run either.
    checkpoint.update(_hyper_parameters(module, checkpoint))
    theirs = {key: checkpoint.pop(key) for key in checkpoint.keys() - own} if lenient else {}
    return {**{key: _plain(value, key) for key, value in checkpoint.items()}, **_plain_entries(theirs)}


def module_checkpoint(module: LightningModule, epoch: int, global_step: int) -> dict[str, Any]:
    """A module as it is now, as an ordinary Lightning checkpoint without the state of a run."""
    checkpoint: dict[str, Any] = {
        "epoch": epoch,
        "global_step": global_step,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": module.state_dict(),
        **_hyper_parameters(module),
    }
    module.on_save_checkpoint(checkpoint)
    checkpoint.update(_hyper_parameters(module, checkpoint))
    return {key: _plain(value, key) for key, value in checkpoint.items()}


def results_of(loop: FederatedLoop) -> dict[str, Any]:
    """The states of a run's parts after a fit, but for what clients keep, for the parent of forked ranks."""
    parts = {name: part for name, part in parts_of(loop).items() if part is not loop.backend}
    found = {}
    for name, part in parts.items():
        # A callback of Lightning's may have a state that cannot be brought home.
        with suppress(*([ConfigurationError] if hasattr(part, "owner") else [])):
            found[name] = _plain(getattr(part, "owner", part).state_dict(), name)
    return found


def take_results(loop: FederatedLoop, states: dict[str, Any]) -> None:
    """Give a loop the states that :func:`results_of` has found elsewhere."""
    for name, part in parts_of(loop).items():
        if name in states:
            getattr(part, "owner", part).load_state_dict(states[name])


def parts_of(loop: FederatedLoop) -> dict[str, Any]:
    """The objects of a run that have a state of their own, by name."""
    parts: dict[str, Any] = {"server": loop.server, "client": loop.client, "client states": loop.backend}
    if loop._federation is not None:
        parts["schedules"] = loop._federation.schedules
    parts |= {f"transform {place}": transform for place, transform in enumerate(loop.transforms or [])}
    for callback in loop.callbacks:
        if callback is not loop.server:
            name = f"{type(callback).__module__}.{type(callback).__qualname__}"
            of_its_class = sum(known.rpartition(" ")[0] == name for known in parts)
            parts[f"{name} {of_its_class}"] = callback
    return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}


def _hyper_parameters(module: LightningModule, checkpoint: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The module's hyperparameters under the keys that ``load_from_checkpoint`` reads, where they are plain values.

    Args:
        module: the module.
        checkpoint: one that has them already, maybe with more; None to take the module's.
    """
    found = module.hparams if checkpoint is None else checkpoint.get(module.CHECKPOINT_HYPER_PARAMS_KEY)
    if not found:
        return {}
    kept = {}
    for name, value in dict(found).items():
        try:
            kept[name] = _plain(value, name)
        except ConfigurationError:
            rank_zero_warn(
                f"The hyperparameter `{name}` is a `{type(value).__name__}` and is not kept in checkpoints."
                f" Give it to `load_from_checkpoint` as an argument."
            )
    names = {module.CHECKPOINT_HYPER_PARAMS_NAME: hparams_name(module)}
    return {module.CHECKPOINT_HYPER_PARAMS_KEY: kept, **{key: name for key, name in names.items() if name}}


def _plain_entries(values: Mapping[Any, Any], where: str = "") -> dict[Any, Any]:
    """The entries that :func:`_plain` takes; the others are left out, with a warning for each."""
    kept: dict[Any, Any] = {}
    for key, value in values.items():
        label = f"{where}.{key}".lstrip(".")
        try:
            kept[key] = _plain(value, label)
        except ConfigurationError as error:
            if isinstance(value, Mapping):
                kept[key] = _plain_entries(value, label)
            else:
                rank_zero_warn(f"{error.problem} It is left out.")
    return kept


def _plain(value: Any, where: str) -> Any:
    """A value made of what `torch.load` takes without running code; tensors are passed on as they are."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) in _SAFE or isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        items = {
            _plain(key, where): _plain(item, f"{where}.{key}".removeprefix("checkpoint."))
            for key, item in value.items()
        }
        metadata = metadata_of(value)
        if metadata is None:
            return items
        # A state dict, with the versions of its modules in an attribute.
        state_dict = OrderedDict(items)
        set_metadata(state_dict, metadata)
        return state_dict
    if isinstance(value, Sequence | set) and not isinstance(value, str | bytes | bytearray | memoryview):
        # A sequence of another kind, such as OmegaConf's, is kept as a list.
        kind = next((kind for kind in (tuple, set) if isinstance(value, kind)), list)
        return kind(_plain(item, f"{where}.{i}") for i, item in enumerate(value))
    raise ConfigurationError(
        f"`{where}` is a `{type(value).__name__}`, which a checkpoint cannot hold: loading it could run code.",
        "Keep it as tensors and plain values.",
    )
