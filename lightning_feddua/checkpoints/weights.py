"""The weights of a checkpoint, for validation, test and prediction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_feddua._private import metadata_of, set_metadata
from lightning_feddua.certificates.certificate import digests
from lightning_feddua.checkpoints.exchange import read_on_rank_zero
from lightning_feddua.checkpoints.files import AVERAGED, FEDERATED, find_last, read_checkpoint
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.federation import Federation


def load_weights(federation: Federation, out_dir: Path, ckpt_path: str | Path, callbacks: Sequence[Any]) -> None:
    """Give the module the weights of a checkpoint that the run has validated; a collective.

    These are the ``state_dict``, or the average of the last two iterates where the server's step is adaptive.

    Args:
        federation: the module, set up.
        out_dir: where runs are kept.
        ckpt_path: a file, of a federated run or of Trainer; ``"last"``, that of the newest run in ``out_dir``; or
            ``"best"``, the best one by the ``monitor`` of a ``Checkpoint``.
        callbacks: of the loop; one of them may know the best file.
    """
    checkpoint = read_on_rank_zero(federation.fabric, _read, out_dir, ckpt_path, callbacks)
    if AVERAGED in checkpoint and FEDERATED in checkpoint:
        metadata = metadata_of(checkpoint["state_dict"])
        checkpoint["state_dict"] = OrderedDict(checkpoint[AVERAGED])
        set_metadata(checkpoint["state_dict"], metadata)
    module = federation.module
    module.on_load_checkpoint(checkpoint)
    saved = checkpoint["state_dict"]
    # A state dict leaves out buffers that are not persistent.
    buffers = {**checkpoint.get(FEDERATED, {}).get("buffers", {}), **saved}
    federation.load(saved, {name: buffers[name] for name, _ in module.named_buffers() if name in buffers})


def check_model(federation: Federation, average: Tensor | None, checkpoint: Mapping[str, Any], path: Path) -> None:
    """One clear error if the model in a checkpoint is not that of its run, whose state the module holds.

    Args:
        federation: the module.
        average: the run's averaged iterate, if it has one.
        checkpoint: the checkpoint, as the module's own hooks have left it.
        path: its file.
    """
    own = federation.module.state_dict()
    averaged = own
    if average is not None:
        named = dict(federation.parameters.named_views(federation.module, average))
        averaged = {**own, **{name: value for name, value in named.items() if name in own}}
    models = {AVERAGED: [averaged]} if AVERAGED in checkpoint else {}
    # Files of the best rounds have there what was validated.
    models["state_dict"] = [averaged, own]
    for key, expected in models.items():
        differing = [_differing(checkpoint[key], one) for one in expected]
        if all(differing):
            raise ConfigurationError(
                f"The model in the checkpoint `{path}` is not that of its run: `{key}` has another"
                f" `{min(differing, key=len)[0]}`.",
                "Take the model from another checkpoint.",
            )


def _differing(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """The names of tensors that are not the same to the bit; hooks of the module may keep others, or fewer."""
    pairs = {name: (saved[name], value) for name, value in expected.items() if name in saved}
    tensors = {name: pair for name, pair in pairs.items() if all(isinstance(value, Tensor) for value in pair)}
    return [name for name, pair in tensors.items() if len({*digests(*(value.cpu() for value in pair))}) > 1]


def _read(out_dir: Path, ckpt_path: str | Path, callbacks: Sequence[Any]) -> dict[str, Any]:
    if ckpt_path == "last":
        found = find_last(out_dir)
        if found is None:
            raise ConfigurationError(f"There is no checkpoint in `{out_dir}`.", "Give the path of a checkpoint.")
        return found.checkpoint
    path = _best(out_dir, callbacks) if ckpt_path == "best" else Path(ckpt_path)
    checkpoint = read_checkpoint(path, "Give the path of another checkpoint.")
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise ConfigurationError(f"The file `{path}` has no `state_dict`.", "Give a checkpoint of Lightning's.")
    return checkpoint


def _best(out_dir: Path, callbacks: Sequence[Any]) -> Path:
    """The best checkpoint that this loop has kept, or else the newest run in the folder."""
    for callback in callbacks:
        # Without a monitor, the best one is merely the newest.
        path = getattr(callback, "best_model_path", None)
        if path and getattr(callback, "monitor", None) is not None:
            return Path(path)
    found = find_last(out_dir)
    for state in found.state["parts"].values() if found is not None else ():
        scores = state.get("scores") if isinstance(state, dict) and state.get("monitor") is not None else None
        if found is not None and scores:
            return found.path.parent / min(scores, key=scores.__getitem__)
    raise ConfigurationError(
        f"Neither this loop nor the newest run in `{out_dir}` has kept a best checkpoint.",
        "Fit with `Checkpoint(monitor=...)` first, or give the path of a checkpoint.",
    )
