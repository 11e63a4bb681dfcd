"""Loggers that go on where the run was."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, Logger, TensorBoardLogger


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
        if type(logger).__name__ == position["class"] and getattr(logger, "_version", "") is None:
            logger._version = position["version"]  # type: ignore[attr-defined]


def replay(fabric: Fabric, history: Sequence[Mapping[str, Any]]) -> None:
    """Bring the logs to the rounds of the history: none missing, none twice, none after them.

    A CSVLogger deletes the file that it finds, so it gets all rounds anew. TensorBoard is told to forget what it has of
    later rounds. Services that keep logs elsewhere have their own ways to resume.
    """
    if not fabric.is_global_zero:
        return
    for logger in fabric.loggers:
        if isinstance(logger, CSVLogger):
            logger._experiment = None
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*exists and is not empty")
                for row in history:
                    logger.log_metrics({k: v for k, v in row.items() if k != "round"}, step=row["round"])
        elif isinstance(logger, TensorBoardLogger) and logger._experiment is None:
            logger._kwargs.setdefault("purge_step", len(history))
