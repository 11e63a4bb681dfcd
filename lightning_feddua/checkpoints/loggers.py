"""Loggers that continue where the run was."""

# Annotations are evaluated here: `singledispatch` reads them.
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import singledispatch
from itertools import chain
from typing import TYPE_CHECKING, Any

from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor

from lightning_feddua._private import is_opened, logs_hparams, reopen, set_purge_step, set_version, version_is_open
from lightning_feddua.aggregation.collectives import broadcast_object
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.federation import Federation
from lightning_feddua.lightning_names import lightning_classes

if TYPE_CHECKING:
    from lightning_feddua.run import Run

# A hyperparameter of LightningCLI's own.
_CLASS_PATH = "_class_path"


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


def start_loggers(fabric: Fabric, federation: Federation, run: "Run") -> None:
    """Bring loggers to the run's last round, and tell them the hyperparameters; a collective."""
    _register_other_package()
    if run.history and fabric.is_global_zero:
        for logger in fabric.loggers:
            resume_logger(logger, run.history)
    federation.view.set_folder(str(run.folder), _log_dir(fabric))
    hyperparameters = _hyperparameters(federation)
    if hyperparameters is not None:
        for logger in fabric.loggers:
            # Fabric's CSVLogger has no place for them.
            with suppress(NotImplementedError):
                logger.log_hyperparams(hyperparameters)
    # Fabric's loggers have no option that says whether the graph is wanted.
    for logger in fabric.loggers:
        if isinstance(logger, lightning_classes("loggers.Logger")):
            with federation.view.detached(federation.module):
                logger.log_graph(federation.module)


def _log_dir(fabric: Fabric) -> str | None:
    """Where the first logger writes, if there is one: asked on rank 0, which alone knows its version."""
    if not fabric.loggers:
        return None
    own = None
    if fabric.is_global_zero:
        logger = fabric.loggers[0]
        # As under Trainer, where these two have a folder for each run.
        names = ("loggers.CSVLogger", "loggers.TensorBoardLogger")
        local = (CSVLogger, TensorBoardLogger, *chain.from_iterable(map(lightning_classes, names)))
        own = logger.log_dir if isinstance(logger, local) else getattr(logger, "save_dir", None)
    return broadcast_object(fabric, None if own is None else str(own))


def _hyperparameters(federation: Federation) -> dict[str, Any] | None:
    """Those that module and data module have saved for loggers, in one dict; None if neither has."""
    owners = [one for one in (federation.module, federation.view.datamodule) if logs_hparams(one)]
    if not owners:
        return None
    found: dict[str, Any] = {}
    for owner in owners:
        for name, value in dict(owner.hparams_initial).items():
            if name in found and not _same(found[name], value) and name != _CLASS_PATH:
                raise ConfigurationError(
                    f"The module and the data module both save a hyperparameter `{name}`, with different values.",
                    "Rename one of them, or use `save_hyperparameters(logger=False)` in one of the two.",
                )
            found[name] = value
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return type(one) is type(other) and bool(one == other)


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
def _resume_csv(logger: CSVLogger, history: Sequence[Mapping[str, Any]]) -> None:
    """It deletes the file that it finds, so it gets all rounds anew."""
    reopen(logger)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*exists and is not empty")
        for row in history:
            logger.log_metrics({k: v for k, v in row.items() if k != "round"}, step=row["round"])


@resume_logger.register
def _resume_tensorboard(logger: TensorBoardLogger, history: Sequence[Mapping[str, Any]]) -> None:
    """It is told to forget what it has of later rounds."""
    if not is_opened(logger):
        set_purge_step(logger, len(history))


def _register_other_package() -> None:
    """Treat the loggers below ``pytorch_lightning`` alike, if they are imported: they are classes of their own."""
    other = sys.modules.get("lightning_fabric.loggers")
    if other is not None and resume_logger.dispatch(other.CSVLogger) is not _resume_csv:
        resume_logger.register(other.CSVLogger, _resume_csv)
        resume_logger.register(other.TensorBoardLogger, _resume_tensorboard)
