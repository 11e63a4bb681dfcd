"""How a run is brought to the state of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_feddua.certificates.certificate import check_state, digests
from lightning_feddua.checkpoints.digest import digest
from lightning_feddua.checkpoints.files import Found, refused
from lightning_feddua.checkpoints.identity import check_identity
from lightning_feddua.checkpoints.loggers import resume_loggers
from lightning_feddua.checkpoints.schema import check_like, check_tensors, check_types, check_vectors
from lightning_feddua.checkpoints.state import parts_of
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.kept_metrics import load_metric_states

if TYPE_CHECKING:
    from lightning_feddua.host.federation import Federation
    from lightning_feddua.host.parameters import ParameterLayout
    from lightning_feddua.loop import FederatedLoop

_PACKAGE = __name__.partition(".")[0]


def restore(loop: FederatedLoop, federation: Federation, found: Found) -> None:
    """Bring a run to the state of a checkpoint, or say in one sentence what keeps it from there."""
    with refused(found.path):
        state, run = found.state, loop.run
        check_types(state)
        check_identity(state["identity"], loop.identity, found.path, federation, state.get("moved", ()))
        if state["format"] > 1:
            # Modules and datasets that have been in use know more than new ones; the run is still the same.
            loop.identity |= {part: state["identity"][part] for part in ("parts", "clients")}
            loop.identity_digest = digests(loop.identity)[0]
        rounds = len(state["history"])
        if rounds > loop.max_rounds:
            raise ConfigurationError(
                f"The checkpoint `{found.path}` has {rounds} rounds, more than `max_rounds={loop.max_rounds}`.",
                "Ask for as many rounds at least, or start afresh.",
            )
        layout = federation.parameters.layout(federation.module)
        iterates = _check_vectors(loop, federation, state, layout)
        # Those that are not the module come first, so that a file that is refused leaves it as it is.
        _restore_parts(loop, state, found)
        federation.view.ckpt_path = str(found.path)
        federation.module.on_load_checkpoint(found.checkpoint)
        check_tensors(found.checkpoint["state_dict"], federation.module.state_dict(), "`state_dict`", strict=False)
        federation.load(found.checkpoint["state_dict"], state["buffers"])
        # A checkpoint of an earlier version does not say which.
        if "moving" in state:
            federation.let_move(state["moving"])
        load_metric_states(federation.module, state.get("metrics", {}))
        federation.callbacks.load_state_dict(found.checkpoint)
        _check_order(federation, state, found)
        average = None if state["average"] is None else run.average
        run.load_state_dict({**state, "weights": run.weights, "average": average})
        for vector, saved in iterates:
            for name, view in layout.views(vector).items():
                view.copy_(saved[name])
        run.round = rounds
        federation.restore(run.known_weights)
        check_state(loop, federation, found.path)
        if "update_changes" in state:
            seeing = loop._hooks.owners("on_aggregate_end", until=loop.server)
            run.update_changes.load_state_dict(state["update_changes"], seeing)
        resume_loggers(loop.fabric, state["loggers"] if found.run_dir is not None else [])


def _check_vectors(
    loop: FederatedLoop, federation: Federation, state: Mapping[str, Any], layout: ParameterLayout
) -> list[tuple[Tensor, Mapping[str, Tensor]]]:
    """The run's vectors, each with what is to be copied into it, by the parameters' names."""
    run = loop.run
    iterates = []
    for name, vector in (("weights", run.weights), ("average", run.average)):
        saved = state[name]
        # What is saved of a round that has failed has no average, and the next round does not need it.
        if saved is None and name == "average":
            continue
        if vector is None:
            raise ValueError(f"it has an `{name}`, and this run none")
        if state["format"] == 1:
            check_vectors([saved], vector, f"`{name}`")
            saved = layout.views(saved)
        check_tensors(saved, layout.views(vector), f"`{name}`")
        iterates.append((vector, saved))
    check_tensors(state["buffers"], dict(federation.module.named_buffers()), "`buffers`")
    parts = parts_of(loop)
    for name in parts.keys() - state["parts"].keys():
        # A callback, which is called by its import path, may be new.
        if state["format"] > 1 and "." not in name:
            raise ValueError(f"it has no state of `{name}`")
    for name in state["parts"].keys() & parts.keys():
        if _is_own(parts[name]):
            saved = state["parts"][name]
            if name in ("server", "client"):
                check_vectors(saved, run.known_weights, f"state of `{name}`")
            if name != "client states":
                check_like(saved, parts[name].state_dict(), f"state of `{name}`")
    return iterates


def _restore_parts(loop: FederatedLoop, state: Mapping[str, Any], found: Found) -> None:
    parts = parts_of(loop)
    for name, part in parts.items():
        if name not in state["parts"]:
            continue
        saved = state["parts"][name]
        part.load_state_dict(saved)
        if name in ("server", "client") and _is_own(part) and digest(part.state_dict()) != digest(saved):
            raise ValueError(f"its state of `{name}` is none of `{type(part).__name__}`")
    for name in state["parts"].keys() - parts.keys():
        # The package's own callbacks report on a run, and do not steer it.
        if state["parts"][name] and not name.startswith(_PACKAGE):
            rank_zero_warn(f"The checkpoint `{found.path}` has a state of `{name}`, which this run does not have.")


def _is_own(part: Any) -> bool:
    """Whether this package knows what the state of a part looks like."""
    return type(part).__module__.partition(".")[0] == _PACKAGE


def _check_order(federation: Federation, state: Mapping[str, Any], found: Found) -> None:
    """One clear error where a checkpoint that does not say so has its weights in another memory format."""
    vector, saved = federation.parameters.vector, state["weights"]
    known = "channels_last" in state["identity"]["settings"]
    if not known and not torch.equal(vector.cpu(), saved.to(vector.dtype)):
        raise ConfigurationError(
            f"The checkpoint `{found.path}` belongs to another run: its weights have another memory format.",
            "Resume with the `channels_last` that it was saved with, or start afresh.",
        )
