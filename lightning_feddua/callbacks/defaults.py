"""The callbacks of a loop: the user's, the server, and those that report on a run or save it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.callbacks.certify import Certify
from lightning_feddua.callbacks.checkpoint import Checkpoint
from lightning_feddua.callbacks.client_log import ClientLog
from lightning_feddua.callbacks.csv_log import CSVLog
from lightning_feddua.callbacks.early_stopping import EarlyStopping
from lightning_feddua.callbacks.lightning import adapted, merged
from lightning_feddua.callbacks.progress import ProgressBar
from lightning_feddua.callbacks.run_info import RunInfo
from lightning_feddua.callbacks.stopping import Stopping
from lightning_feddua.callbacks.tensorboard import TensorBoard
from lightning_feddua.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_feddua.servers import Server
    from lightning_feddua.settings import RunSettings


def all_callbacks(settings: RunSettings, server: Server, configured: Sequence[Any] = ()) -> list[FederatedCallback]:
    """In the order in which they are called: the user's, the server, what reports on a round, and what saves it.

    Args:
        settings: the loop's.
        server: the server.
        configured: what the module's ``configure_callbacks`` returns.
    """
    given = settings.callbacks or []
    listed = list(given) if isinstance(given, list | tuple) else [given]
    callbacks = adapted(merged(listed, configured))
    saving = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    stopping = [callback for callback in callbacks if isinstance(callback, EarlyStopping)]
    own = [callback for callback in callbacks if callback not in saving and callback not in stopping]
    tensorboard = [TensorBoard()] if settings.tensorboard else []
    progress = [ProgressBar()] if settings.enable_progress_bar else []
    clients = [ClientLog()] if settings.log_clients else []
    reporting = [Certify(), CSVLog(), *clients, RunInfo()]
    saving = _checkpoints(settings, saving)
    return [*own, server, *stopping, *reporting, Stopping(), *saving, *tensorboard, *progress]


def _checkpoints(settings: RunSettings, given: list[Checkpoint]) -> list[Checkpoint]:
    """Those that save the run: what is asked for, or else one that saves its end."""
    if settings.fast_dev_run:
        return []
    every = settings.checkpoint_every
    saving = given if every is None else [*given, Checkpoint(every)]
    if saving and not settings.enable_checkpointing:
        asked = f"checkpoint_every={every}" if every is not None else type(saving[0]).__name__
        raise ConfigurationError(
            f"`enable_checkpointing=False` forbids what `{asked}` asks for.", "Leave one of the two out."
        )
    for callback in saving:
        callback.share_files(saving)
    return saving or ([Checkpoint(every=None)] if settings.enable_checkpointing else [])


def saves(callbacks: Sequence[FederatedCallback]) -> bool:
    """Whether the run is saved."""
    return any(isinstance(callback, Checkpoint) for callback in callbacks)
