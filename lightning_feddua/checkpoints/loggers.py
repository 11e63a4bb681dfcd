"""Loggers that continue where the run was."""

# Annotations are evaluated here: `singledispatch` reads them.
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import singledispatch
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_feddua._private import is_opened, reopen, set_purge_step, set_version, version_is_open
from lightning_feddua.host.federation import Federation
from lightning_feddua.run import Run


def logger_positions(fabric: Fabric) -> list[dict[str, Any]]:
    """Where each logger writes: its class and its version."""
    # Only there do they write; elsewhere the question alone might make them choose a version.
    loggers = fabric.loggers if fabric.is_global_zero else []
    return [{"class": type(logger).__name__, "version": _plain_version(logger)} for logger in loggers]


def _plain_version(logger: Logger) -> int | str | None:
    return logger.version if isinstance(logger.version, int | str) else None


def resume_loggers(fabric: Fabric, positions: Sequence[Mapping[str, Any]]) -> None:
    """Let loggers whose version was left open write where they did before.

    Args:
        fabric: its loggers.
        positions: what :func:`logger_positions` gave when the checkpoint was written.
    """
    for logger, position in zip(fabric.loggers, positions, strict=False):
        # A logger chooses its version when it is first asked for it, and None says that it has not been.
        if type(logger).__name__ == position["class"] and version_is_open(logger):
            set_version(logger, position["version"])


def start_loggers(fabric: Fabric, federation: Federation, run: Run) -> None:
    """Bring loggers to the run's last round, and tell them the module's hyperparameters."""
    federation.view.default_root_dir = federation.view.log_dir = str(run.folder)
    if run.history and fabric.is_global_zero:
        for logger in fabric.loggers:
            resume_logger(logger, run.history)
    if federation.module.hparams:
        for logger in fabric.loggers:
            # Fabric's CSVLogger has no place for them.
            with suppress(NotImplementedError):
                logger.log_hyperparams(dict(federation.module.hparams))


def finish_loggers(fabric: Fabric, status: str) -> None:
    """Close all loggers."""
    for logger in fabric.loggers:
        logger.finalize(status)


@singledispatch
def resume_logger(logger: Logger, history: Sequence[Mapping[str, Any]]) -> None:
    """Bring a logger to the rounds of the history, on rank 0: none missing, none twice, none after them.

    Nothing happens by default: services that keep logs elsewhere have their own ways to resume. Register a function
    for a logger that needs something, or give the logger a method ``resume(history)``:

    >>> class MyLogger:
    ...     pass
    >>> @resume_logger.register
    ... def _(logger: MyLogger, history):
    ...     print("resumed after round", history[-1]["round"])
    >>> resume_logger(MyLogger(), [{"round": 4}])
    resumed after round 4

    Args:
        logger: the logger.
        history: one row for each finished round.
    """
    if (own := getattr(type(logger), "resume", None)) is not None:
        own(logger, history)


@resume_logger.register
def _(logger: CSVLogger, history: Sequence[Mapping[str, Any]]) -> None:
    """It deletes the file that it finds, so it gets all rounds anew."""
    reopen(logger)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*exists and is not empty")
        for row in history:
            logger.log_metrics({k: v for k, v in row.items() if k != "round"}, step=row["round"])


@resume_logger.register
def _(logger: TensorBoardLogger, history: Sequence[Mapping[str, Any]]) -> None:
    """It is told to forget what it has of later rounds."""
    if not is_opened(logger):
        set_purge_step(logger, len(history))
