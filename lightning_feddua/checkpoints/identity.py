"""What must be the same for a run to be resumed as if it had never stopped: settings, model and clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_feddua.aggregation.collectives import gather_objects
from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.certificates.certificate import digests
from lightning_feddua.checkpoints.data_contents import Contents, digest
from lightning_feddua.checkpoints.data_digest import data_digests, differing_client
from lightning_feddua.checkpoints.module_parts import module_parts
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.federation import Federation

if TYPE_CHECKING:
    from lightning_feddua.clients import LocalTraining
    from lightning_feddua.servers import Server
    from lightning_feddua.settings import RunSettings

_PLAIN = (bool, int, float, str, type(None))
# What a checkpoint means that was written before these settings existed.
_LATER_SETTINGS: dict[str, Any] = {"sampler": None, "transforms": None, "accumulate_grad_batches": 1}
_LATER_SETTINGS |= {"reproducible": False, "threads": None}
_LATER_SETTINGS |= {"gradient_clip_algorithm": None, "limit_train_batches": None, "drop_last": False}
# Attributes of a client algorithm that are its state.
_STATE = ("vectors", "numbers")


def identity(
    settings: RunSettings,
    server: Server,
    client: LocalTraining,
    federation: Federation,
    callbacks: Sequence[FederatedCallback] = (),
) -> dict[str, Any]:
    """Everything that decides a run's result besides its state, as plain values.

    Args:
        settings: the loop's; those that decide the result count.
        server: the server rule.
        client: the clients' algorithm.
        federation: the module and its clients, with optimizers.
        callbacks: of the loop; what they declare counts.
    """
    # What "auto" has chosen is told by the engine.
    settings = replace(settings, server=server, client=client, compile=settings.compile is True)
    clients = _clients(federation)
    if settings.reproducible and federation.unsteady_client is not None:
        raise ConfigurationError(
            f"The data of client `{federation.unsteady_client}` differs between two looks with the same seed, so that"
            " `reproducible=True` cannot be promised.",
            "Draw its random numbers from the global generators of torch, NumPy or Python, which are seeded for each"
            " client, or leave `reproducible` out.",
        )
    return {
        "settings": {
            **_settings(settings, federation),
            **_plain_items("hyperparameter ", dict(federation.module.hparams or {})),
            **{name: value for one in callbacks for name, value in _plain_items("", one.identity).items()},
        },
        "model": {
            name: f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{kind}"
            for kind, named in (
                (" trainable", [(n, p) for n, p in federation.module.named_parameters() if p.requires_grad]),
                (" frozen", [(n, p) for n, p in federation.module.named_parameters() if not p.requires_grad]),
                (" buffer", federation.module.named_buffers()),
            )
            for name, tensor in named
        },
        "parts": module_parts(federation.module),
        "clients": clients,
    }


class _Difference(NamedTuple):
    """What two runs do not have in common; how it is in each, where that can be said."""

    what: str
    one: Any = None
    other: Any = None


def agreed_digest(own: Mapping[str, Any], federation: Federation) -> str:
    """A digest of a run's identity, which must be the same on every rank; a collective.

    Raises:
        ConfigurationError: a rank has other settings, another model or other data.
    """
    everybody = gather_objects(federation.fabric, own)
    for rank, other in enumerate(everybody):
        found = _difference(everybody[0], other, federation)
        if found is not None:
            values = "" if found.one is None else f", which is `{found.one}` on one and `{found.other}` on the other"
            raise ConfigurationError(
                f"Ranks 0 and {rank} do not train the same run: they differ in {found.what}{values}.",
                "Give every rank the same script, arguments and data.",
            )
    return digests(own)[0]


def moved_parts(own: Mapping[str, Any], federation: Federation) -> list[str]:
    """Which numbers of the module are not what they were before the first round: none of those is a setting."""
    now = module_parts(federation.module)
    return [name for name, value in own["parts"].items() if repr(now.get(name)) != repr(value)]


def check_identity(
    saved: Mapping[str, Any], own: Mapping[str, Any], path: Path, federation: Federation, moved: Sequence[str] = ()
) -> None:
    """One clear error that says what differs, if anything does.

    Args:
        saved: the identity of the run that wrote the checkpoint.
        own: the identity of the run that resumes it.
        path: the checkpoint.
        federation: the module and its clients.
        moved: numbers of the module that have changed since the run began.
    """
    found = _difference(saved, own, federation, moved)
    if found is not None:
        values = "changed" if found.one is None else f"was `{found.one}` and is `{found.other}`"
        raise ConfigurationError(
            f"The checkpoint `{path}` belongs to another run: {found.what} {values}.",
            "Resume with what it was saved with, or start afresh; `load_from_checkpoint` gives its model to a new run.",
        )


def _difference(
    one: Mapping[str, Any], other: Mapping[str, Any], federation: Federation, moved: Sequence[str] = ()
) -> _Difference | None:
    known = {**_LATER_SETTINGS, **one["settings"]}
    for name, value in other["settings"].items():
        # What only one of the two knows belongs to another class, which differs itself, or to another version of torch.
        if name in known and known[name] != value:
            return _Difference(f"`{name}`", str(known[name]), str(value))
    for name in sorted({*one["model"], *other["model"]}):
        pair = [model.get(name, "not there") for model in (one["model"], other["model"])]
        if pair[0] != pair[1]:
            return _Difference(f"the model's `{name}`", *pair)
    # Checkpoints of the first format have none.
    parts, others = one.get("parts", {}), other["parts"]
    for name in parts.keys() & others.keys() - {*moved}:
        # Not a number is not itself.
        if repr(parts[name]) != repr(others[name]):
            return _Difference(f"`{name}` of the module", str(parts[name]), str(others[name]))
    mine, theirs = one["clients"], other["clients"]
    if mine["count"] != theirs["count"]:
        return _Difference("the number of clients", mine["count"], theirs["count"])
    # The first format of checkpoints has less to say of the data.
    if "data" not in mine:
        return None
    for part in ("names", "sizes"):
        if mine[part] != theirs[part]:
            return _Difference(f"the {part[:-1]} of a client")
    changed = differing_client(mine["data"], theirs["data"], federation)
    return None if changed is None else _Difference(changed)


def _settings(run_settings: RunSettings, federation: Federation) -> dict[str, Any]:
    """Settings by name, objects among them by their class and attributes, and what module and data set."""
    settings: dict[str, Any] = {}
    for name, value in run_settings.deciding():
        if isinstance(value, list):
            settings[name] = [type(part).__name__ for part in value]
            for place, part in enumerate(value):
                settings.update(_describe(f"{name}[{place}]", part))
        else:
            value = _number(value)
            settings.update({name: value} if _is_plain(value) else _describe(name, value))
    settings["batch_size"] = federation.datamodule.batch_size
    settings["drop_last"] = federation.datamodule.drop_last
    if federation.optimizers.plateaus:
        # Then validation has a say in the clients' learning rates.
        settings["validate_every"] = run_settings.validate_every
        settings["limit_val_batches"] = run_settings.limit_val_batches
        settings["validation data"] = Contents().digest(getattr(federation.datamodule, "val_dataset", None))
    for i, optimizer in enumerate(federation.optimizers.optimizers):
        settings[f"optimizer {i}"] = type(optimizer).__name__
        for j, group in enumerate(optimizer.param_groups):
            settings.update(_plain_items(f"optimizer {i}, group {j}, ", group))
    for i, config in enumerate(federation.optimizers.schedulers):
        settings[f"scheduler {i}"] = type(config.scheduler).__name__
        settings.update(_plain_items(f"scheduler {i}, ", config.scheduler.state_dict()))
    return settings


def _describe(name: str, value: Any, depth: int = 2) -> dict[str, Any]:
    """An object's class and public attributes, those of the objects in it included."""
    described: dict[str, Any] = {name: type(value).__name__}
    attributes = {key: _summary(item) for key, item in getattr(value, "__dict__", {}).items() if key not in _STATE}
    described.update(_plain_items(f"{name}.", attributes))
    for key, inner in attributes.items():
        listed = {f".{i}": item for i, item in enumerate(inner)} if isinstance(inner, list | tuple) else {"": inner}
        for place, item in listed.items():
            if depth and not key.startswith("_") and hasattr(item, "__dict__") and not callable(item):
                described.update(_describe(f"{name}.{key}{place}", item, depth - 1))
    return described


def _summary(value: Any) -> Any:
    """What tells whether an array has changed; any other value as it is."""
    if not isinstance(value, Tensor | np.ndarray) or value.ndim == 0:
        return value
    array = value.detach().cpu().contiguous().numpy() if isinstance(value, Tensor) else np.ascontiguousarray(value)
    return f"{array.dtype} {array.shape} {digest([array.tobytes()])}"


def _plain_items(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    items = {key: _number(value) for key, value in values.items() if not key.startswith("_")}
    return {f"{prefix}{key}": value for key, value in items.items() if _is_plain(value)}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor | np.generic) and value.ndim == 0 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _PLAIN)


def _clients(federation: Federation) -> dict[str, Any]:
    return {
        "count": len(federation.client_ids),
        "names": digest(str(name).encode() for name in federation.client_ids),
        # A population that makes its datasets when they are asked for is not made as a whole to be counted.
        "sizes": digest([federation.sizes.astype(np.int64).tobytes()] if federation.datamodule.sizes_are_known else []),
        "data": data_digests(federation),
    }
