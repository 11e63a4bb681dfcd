"""What is left of a run that ends by an exception: the rounds before it, where their state is still to be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_feddua.aggregation.simulation import Simulation
from lightning_feddua.aggregation.transforms import UpdateTransform
from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.callbacks.checkpoint import Checkpoint
from lightning_feddua.callbacks.stopping import resume_command
from lightning_feddua.checkpoints.files import LAST
from lightning_feddua.clients import LocalTraining

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop

# Called since the last whole round, when a client fails.
_HOOKS = ("on_round_start", "on_client_start", "on_client_end")


def rescue(loop: FederatedLoop, exception: BaseException) -> None:
    """Save the last whole round, if that is possible to the bit, and say how to resume; the exception goes on.

    Args:
        loop: the loop, whose module holds the global weights again.
        exception: why the run ends. Whoever presses Ctrl-C twice does not want to wait.
    """
    all_saving = [callback for callback in loop.callbacks if isinstance(callback, Checkpoint)]
    if not all_saving or not isinstance(exception, Exception):
        return
    # The last one writes what a run is resumed from.
    saving = all_saving[-1]
    if loop.run.is_whole and _all_ranks_are_here(loop) and _is_exact(loop):
        try:
            saving.save_last_round(loop)
        except Exception as error:
            rank_zero_warn(f"The rounds before could not be saved: {error}")
    if saving.saved_rounds and (loop.run_dir / LAST).exists():
        how = resume_command(loop.run_dir)
        rank_zero_info(f"The run has failed and is saved after round {saving.saved_rounds}. Resume with `{how}`.")


def _all_ranks_are_here(loop: FederatedLoop) -> bool:
    return loop.fabric.world_size == 1 or (isinstance(loop.backend, Simulation) and loop.backend.failed_together)


def _is_exact(loop: FederatedLoop) -> bool:
    """Whether nothing that is saved has changed since the last round: neither by its beginning nor by its clients."""
    if not isinstance(loop.backend, Simulation) or loop.backend.states.names:
        return False
    begins = any(type(part).begin_round is not LocalTraining.begin_round for part in loop.client.parts)
    states = any(type(one).state_dict is not UpdateTransform.state_dict for one in loop.transforms or [])
    return not begins and not states and not any(_may_have_moved(callback) for callback in loop.callbacks)


def _may_have_moved(callback: FederatedCallback) -> bool:
    """Whether a callback of somebody else's keeps a state, and may have changed it in a round that has failed."""
    kind = type(callback)
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return False
    overrides = {
        name for name in ("state_dict", *_HOOKS) if getattr(kind, name, None) is not getattr(FederatedCallback, name)
    }
    return "state_dict" in overrides and len(overrides) > 1
