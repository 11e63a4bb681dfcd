"""The callbacks of a loop: the user's, the server, and those that report on a run or save it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.callbacks.checkpoint import Checkpoint
from lightning_feddua.callbacks.csv_log import CSVLog
from lightning_feddua.callbacks.progress import ProgressBar
from lightning_feddua.callbacks.run_info import RunInfo
from lightning_feddua.callbacks.tensorboard import TensorBoard
from lightning_feddua.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_feddua.servers import Server
    from lightning_feddua.settings import RunSettings


def all_callbacks(settings: RunSettings, server: Server) -> list[FederatedCallback]:
    """In the order in which they are called: the user's, the server, and what reports on a round or saves it."""
    given = settings.callbacks or []
    given = [given] if isinstance(given, FederatedCallback) else list(given)
    own = [callback for callback in given if not isinstance(callback, Checkpoint)]
    saving = [callback for callback in given if isinstance(callback, Checkpoint)]
    if settings.checkpoint_every is not None:
        saving.append(Checkpoint(settings.checkpoint_every))
    if len(saving) > 1:
        raise ConfigurationError(
            f"There are {len(saving)} `Checkpoint`s, which would write the same files.",
            "Give one, or `checkpoint_every` alone.",
        )
    tensorboard = [TensorBoard()] if settings.tensorboard else []
    progress = [ProgressBar()] if settings.enable_progress_bar else []
    return [*own, server, CSVLog(), RunInfo(), *saving, *tensorboard, *progress]


def saves(callbacks: Sequence[FederatedCallback]) -> bool:
    """Whether the run is saved."""
    return any(isinstance(callback, Checkpoint) for callback in callbacks)
