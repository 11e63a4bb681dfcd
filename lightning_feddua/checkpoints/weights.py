"""The weights of a checkpoint, for validation, test and prediction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_feddua._private import metadata_of, set_metadata
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
