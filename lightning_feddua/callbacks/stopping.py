"""How a run ends before its last round: the same on all ranks, and with a word on how to resume it."""

from __future__ import annotations

import shlex
import signal
from typing import TYPE_CHECKING

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_feddua.aggregation.collectives import all_reduce_sum, gather_objects, on_rank_zero
from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.callbacks.checkpoint import Checkpoint
from lightning_feddua.checkpoints.files import LAST, Found
from lightning_feddua.errors import UnsavedError
from lightning_feddua.launch.fabric import leave
from lightning_feddua.launch.run_folders import RECIPE_FILE
from lightning_feddua.wording import counted

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_feddua.loop import FederatedLoop


class Stopping(FederatedCallback):
    """Lets all ranks agree, at the end of a round, on whether it is the last.

    It comes after the callbacks of the user, who may ask for that, and before those that save.
    """

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Agree: one rank that wants to stop is enough, and a signal says more than a wish."""
        run = loop.run
        run.stop_reason = None
        if agree_on_signals(loop) and run.stop_signal is None:
            reasons = gather_objects(loop.fabric, run.stop_request)
            run.stop_reason = next(reason for reason in reasons if reason is not None)


def agree_on_signals(loop: FederatedLoop) -> bool:
    """Let all ranks know of a signal that one has got; a collective. Whether one wants to stop, for whatever reason."""
    run, fabric, signals = loop.run, loop.fabric, loop._preemption
    votes = torch.tensor(
        [run.stop_request is not None, signals.interrupted, signals.requested],
        dtype=torch.int32,
        device=fabric.device if fabric.world_size > 1 else None,
    )
    all_reduce_sum(fabric, votes)
    asked, interrupted, terminated = (votes > 0).tolist()
    run.stop_signal = signal.SIGTERM if terminated else signal.SIGINT if interrupted else None
    if run.stop_signal is not None:
        run.stop_reason = signal.Signals(run.stop_signal).name
    return asked or run.stop_signal is not None


def heed_signals_of_save(loop: FederatedLoop) -> None:
    """After a round that was saved: begin no other if a signal came meanwhile, which may have taken long."""
    run, rounds = loop.run, len(loop.history)
    savers = [one for one in loop.callbacks if isinstance(one, Checkpoint)]
    if run.stop_reason is None and any(one.saved_now(rounds) for one in savers):
        agree_on_signals(loop)
        if run.stop_signal is not None:
            savers[-1].save_last_round(loop)


def unsaved(loop: FederatedLoop) -> UnsavedError | None:
    """What was lost of a run that is over, for want of room on the disk, say; the same on every rank. A collective."""

    def find() -> UnsavedError | None:
        if not loop.run.unsaved:
            return None
        files = ", ".join(f"`{file}`: {problem}" for file, problem in loop.run.unsaved.items())
        how = f"resume with `{resume_command(loop.run_dir)}`" if (loop.run_dir / LAST).exists() else "run it again"
        rounds = counted(len(loop.history), "round")
        return UnsavedError(
            f"The run has ended after {rounds}, but not all of it could be saved ({files}).", f"Make room, and {how}."
        )

    error: UnsavedError | None = on_rank_zero(loop.fabric, find)
    return error


def leave_if_told(loop: FederatedLoop) -> None:
    """After a round that a signal has made the last: end the process, or raise KeyboardInterrupt."""
    if loop.run.stop_signal is not None:
        if (error := unsaved(loop)) is not None:
            rank_zero_warn(str(error))
        leave(loop.fabric, loop.run.stop_signal, len(loop.history), resume_command(loop.run_dir))


def tell_why(loop: FederatedLoop) -> None:
    """After a run that was stopped: the reason and, if it was saved, how to resume it."""
    if loop.stopping and len(loop.history) < loop.max_rounds:
        saved = (loop.run_dir / LAST).exists()
        how = f" Resume with `{resume_command(loop.run_dir)}`." if saved else ""
        rank_zero_info(f"Stopped after {counted(len(loop.history), 'round')}: {loop.run.stop_reason}.{how}")


def resume_command(run_dir: Path, max_rounds: int | None = None) -> str:
    """What resumes a run, ready to be pasted: a command where a recipe was run, or else a line of Python.

    Args:
        run_dir: the folder of the run.
        max_rounds: for a run that has all its rounds, how many it is to have.
    """
    recipe, checkpoint = run_dir / RECIPE_FILE, run_dir / LAST
    if recipe.is_file():
        longer = [] if max_rounds is None else ["--loop.max_rounds", str(max_rounds)]
        return shlex.join(["feddua", "fit", "--config", str(recipe), "--ckpt_path", str(checkpoint), *longer])
    longer_loop = "" if max_rounds is None else f"loop.max_rounds = {max_rounds}; "
    return f"{longer_loop}loop.fit(model, datamodule, ckpt_path={str(checkpoint)!r})"


def has_all_rounds(loop: FederatedLoop, found: Found | None) -> bool:
    """Whether the file to resume from leaves nothing to do, which is then said instead of making another folder."""
    if found is None or found.run_dir is not None or len(loop.history) < loop.max_rounds:
        return False
    loop.run.folder = found.path.parent
    rounds = counted(len(loop.history), "round")
    rank_zero_info(f"The checkpoint `{found.path}` has {rounds}, all of `max_rounds`. Raise it to train longer.")
    return True
