from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.checkpoints.files import LAST, round_name, write
from lightning_feddua.checkpoints.state import capture
from lightning_feddua.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop


class Checkpoint(FederatedCallback):
    """Saves the run: ``last.ckpt`` and ``round-0100.ckpt`` in the run's folder, and a last time when it ends.

    A save that fails, for want of room on the disk, say, is a warning: the checkpoint before it is still whole, and the
    rounds already done are worth more than the end of the run.

    Args:
        every: save after every so many rounds.
        monitor: a name in ``loop.history`` by which to choose the rounds to keep. For rules with an adaptive step, the
            plain names are metrics of the averaged iterate (``averaged_state_dict`` in the file), and those of
            ``last_iterate/…`` belong to the weights themselves.
        mode: whether the ``"min"`` or the ``"max"`` of it is best.
        save_top_k: how many round files to keep: the best by ``monitor``, without it the newest; -1 for all.
    """

    def __init__(
        self,
        every: int = 1,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = -1,
    ) -> None:
        if every < 1:
            raise ConfigurationError(f"`every={every}` is less than 1.", "Save after every so many rounds, 1 or more.")
        if mode not in ("min", "max"):
            raise ConfigurationError(f"There is no mode `{mode}`.", "Choose `min` or `max`.")
        if save_top_k < -1:
            raise ConfigurationError(
                f"`save_top_k={save_top_k}` is no number of files.", "Give how many to keep; -1 keeps all."
            )
        self.every = every
        self.monitor = monitor
        self.mode = mode
        self.save_top_k = save_top_k
        self._saved: int | None = None
        # The score of each file that is kept, the smaller the better.
        self._scores: dict[str, float] = {}

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Find out, before any work, whether there is anything that cannot be saved."""
        self._saved = None
        self._scores = {name: score for name, score in self._scores.items() if (loop.run_dir / name).exists()}
        capture(loop)

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Save if it is time, or if the run is about to be stopped."""
        if (round + 1) % self.every == 0 or loop.stopping:
            self._save(loop)

    def on_fit_end(self, loop: FederatedLoop) -> None:
        """Save the final state, unless the last round did."""
        # Rank 0 alone knows whether that has worked.
        if loop.fabric.broadcast(self._saved != len(loop.history)):
            self._save(loop)

    def state_dict(self) -> dict[str, Any]:
        """Which files were kept, and why."""
        return {"monitor": self.monitor, "mode": self.mode, "scores": dict(self._scores)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on comparing with files that were kept by the same metric."""
        same = (state["monitor"], state["mode"]) == (self.monitor, self.mode)
        self._scores = dict(state["scores"]) if same else {}

    def _save(self, loop: FederatedLoop) -> None:
        rounds = len(loop.history)
        name = round_name(rounds)
        before = self._scores
        self._scores = self._choose(name, loop.history[-1] if loop.history else {}, rounds)
        checkpoint = capture(loop)
        if not loop.fabric.is_global_zero:
            return
        for path in (loop.run_dir / file for file in (LAST, name) if file == LAST or file in self._scores):
            try:
                write(checkpoint, path)
            except OSError as error:
                self._scores = before
                rank_zero_warn(
                    f"After {rounds} rounds, `{path}` could not be saved: {error.strerror or error}. The run continues,"
                    " and the checkpoints before it are still there."
                )
                return
        self._saved = rounds
        for other in before.keys() - self._scores.keys():
            (loop.run_dir / other).unlink(missing_ok=True)

    def _choose(self, name: str, row: dict[str, Any], rounds: int) -> dict[str, float]:
        """Enter a file into the competition, and return the scores of those that keep their place."""
        scores = dict(self._scores)
        if self.monitor is None:
            scores[name] = -rounds
        elif self.monitor in row:
            value = float(row[self.monitor])
            score = value if self.mode == "min" else -value
            scores[name] = math.inf if math.isnan(score) else score
        elif row:
            rank_zero_warn(
                f"Round {rounds - 1} has no metric `{self.monitor}` to compare checkpoints by: only `last.ckpt` is"
                " saved. Save in rounds that are validated."
            )
        # Of equal scores the older file stays.
        ranked = sorted(scores.items(), key=lambda item: item[1])
        return dict(ranked if self.save_top_k < 0 else ranked[: self.save_top_k])
