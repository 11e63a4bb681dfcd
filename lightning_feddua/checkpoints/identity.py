"""What must be the same for a run to be resumed as if it had never stopped: settings, model and clients."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_feddua._private import tree_leaves
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.federation import Federation
from lightning_feddua.randomness import Purpose, seed_generators

if TYPE_CHECKING:
    from lightning_feddua.clients import LocalTraining
    from lightning_feddua.servers import Server
    from lightning_feddua.settings import RunSettings

# Clients whose samples are looked at, and samples of each.
_PROBED_CLIENTS = 16
_PROBED_SAMPLES = 4
_PLAIN = (bool, int, float, str, type(None))
# What a checkpoint means that was written before these settings existed.
_LATER_SETTINGS: dict[str, Any] = {"sampler": None, "transforms": None, "accumulate_grad_batches": 1}
_LATER_SETTINGS |= {"gradient_clip_algorithm": None, "limit_train_batches": None, "drop_last": False}
# Attributes of a client algorithm that are its state.
_STATE = ("vectors", "numbers")


def identity(settings: RunSettings, server: Server, client: LocalTraining, federation: Federation) -> dict[str, Any]:
    """Everything that decides a run's result besides its state, as plain values and tensors.

    Args:
        settings: the loop's; those that decide the result count.
        server: the server rule.
        client: the clients' algorithm.
        federation: the module and its clients, with optimizers.
    """
    return {
        "settings": _settings(replace(settings, server=server, client=client), federation),
        "model": {
            name: f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{kind}"
            for kind, named in (
                (" trainable", [(n, p) for n, p in federation.module.named_parameters() if p.requires_grad]),
                (" frozen", [(n, p) for n, p in federation.module.named_parameters() if not p.requires_grad]),
                (" buffer", federation.module.named_buffers()),
            )
            for name, tensor in named
        },
        "clients": _clients(federation),
    }


def check_identity(saved: Mapping[str, Any], own: Mapping[str, Any], path: Path) -> None:
    """One clear error that says what differs, if anything does.

    Args:
        saved: the identity of the run that wrote the checkpoint.
        own: the identity of the run that resumes it.
        path: the checkpoint.
    """
    known = {**_LATER_SETTINGS, **saved["settings"]}
    for name, value in own["settings"].items():
        # What only one of the two knows belongs to another class, which differs itself, or to another version of torch.
        if name in known and known[name] != value:
            _refuse(path, f"`{name}` was `{known[name]}` and is `{value}`")
    for name in sorted({*saved["model"], *own["model"]}):
        before, now = (model.get(name, "not there") for model in (saved["model"], own["model"]))
        if before != now:
            _refuse(path, f"the model's `{name}` was {before} and is {now}")
    before, now = saved["clients"], own["clients"]
    if before["count"] != now["count"]:
        _refuse(path, f"there were {before['count']} clients and are {now['count']}")
    for part in ("names", "sizes"):
        if before[part] != now[part]:
            _refuse(path, f"the clients' {part} are not what they were")
    if not torch.allclose(before["samples"], now["samples"], rtol=1e-4, atol=1e-9, equal_nan=True):
        _refuse(path, "the clients' samples are not what they were")


def _refuse(path: Path, difference: str) -> None:
    raise ConfigurationError(
        f"The checkpoint `{path}` belongs to another run: {difference}.",
        "Resume with what it was saved with, or start afresh; `load_from_checkpoint` gives its model to a new run.",
    )


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
    return f"{array.dtype} {array.shape} {_digest([array.tobytes()])[:16]}"


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
        "names": _digest(str(name).encode() for name in federation.client_ids),
        # A population that makes its datasets when they are asked for is not made as a whole to be counted.
        "sizes": _digest(
            [federation.sizes.astype(np.int64).tobytes()] if federation.datamodule.sizes_are_known else []
        ),
        "samples": _probe(federation),
    }


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _probe(federation: Federation) -> Tensor:
    """Sums over a few samples of a few clients, which tell whether the data is what it was.

    They are compared with a tolerance, because another machine may compute the same samples with other roundings. A
    client whose samples differ between two looks with the same seed says nothing.
    """
    places = np.unique(np.linspace(0, len(federation.client_ids) - 1, _PROBED_CLIENTS).astype(int))
    rows = []
    for place in places.tolist():
        first, second = (_sums(federation, place) for _ in range(2))
        rows.append(first if torch.equal(first, second) else torch.full_like(first, torch.nan))
    return torch.stack(rows)


def _sums(federation: Federation, place: int) -> Tensor:
    seed_generators(0, 0, place, Purpose.EVALUATION, federation.fabric.device)
    total = torch.zeros(2, dtype=torch.float64)
    try:
        data = federation.client_data(place)
        batch = data.batch(np.arange(min(len(data), _PROBED_SAMPLES)))
    except Exception:
        # The run itself fails in the same way, and says so with the right client and round.
        return total
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and not leaf.is_complex():
            values = leaf.detach().cpu().to(torch.float64).flatten()
            # Weights, so that an exchange of two values shows.
            ramp = torch.arange(1, len(values) + 1, dtype=torch.float64) / max(len(values), 1)
            total += torch.stack([values.abs().sum(), (values * ramp).abs().sum()])
    return total
