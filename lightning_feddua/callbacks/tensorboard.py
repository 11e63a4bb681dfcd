from __future__ import annotations

import textwrap
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lightning.fabric.loggers import TensorBoardLogger

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.launch.run_folders import RECIPE_FILE

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate
    from lightning_feddua.loop import FederatedLoop


class TensorBoard(FederatedCallback):
    """Shows the run in TensorBoard: metrics and η_g, a histogram of ‖Δ_i‖ over clients, and the recipe as text.

    It adds a logger that writes to ``tensorboard`` in the run's folder, and which the module finds at ``self.loggers``.
    """

    FOLDER = "tensorboard"
    _FLUSH_SECONDS = 5

    def __init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise ConfigurationError(
                "TensorBoard is not installed, and `tensorboard=True` was asked for.",
                'Run `pip install "lightning-feddua[tensorboard]"`.',
            )
        self._logger: TensorBoardLogger | None = None

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Open the log; that of a resumed run keeps its rounds, and forgets later ones."""
        rounds = len(loop.history)
        new = not (loop.run_dir / self.FOLDER).is_dir()
        logger = TensorBoardLogger(
            loop.run_dir, name="", version=self.FOLDER, purge_step=rounds or None, flush_secs=self._FLUSH_SECONDS
        )
        self._logger = logger
        loop.fabric.loggers.append(logger)
        if not loop.fabric.is_global_zero:
            return
        recipe = loop.run_dir / RECIPE_FILE
        if recipe.is_file():
            # Markdown, in which an indented line is code.
            logger.experiment.add_text("recipe", textwrap.indent(recipe.read_text(), "    "), rounds)
        if new:
            for row in loop.history:
                logger.log_metrics({name: value for name, value in row.items() if name != "round"}, step=row["round"])

    def on_aggregate_end(self, loop: FederatedLoop, update: RoundUpdate) -> None:
        """Add the histogram."""
        if self._logger is not None and loop.fabric.is_global_zero:
            norms = update.squared_norms.double().sqrt().cpu()
            # There is no histogram of anything else.
            if norms.isfinite().all():
                self._logger.experiment.add_histogram("client_update_norm", norms, loop.current_round)

    def on_fit_end(self, loop: FederatedLoop) -> None:
        """Close the log."""
        self._close(loop, "success")

    def on_exception(self, loop: FederatedLoop, exception: BaseException) -> None:
        """Close the log; every finished round is in it."""
        self._close(loop, "failed")

    def _close(self, loop: FederatedLoop, status: str) -> None:
        if self._logger is not None:
            loop.fabric.loggers.remove(self._logger)
            self._logger.finalize(status)
            self._logger = None
