from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_feddua.aggregation.collectives import broadcast_object, on_rank_zero
from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.callbacks.monitored import check_mode, check_monitor, column_of, kept_with, monitored
from lightning_feddua.checkpoints.files import LAST, round_name, write_all
from lightning_feddua.checkpoints.state import capture
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.metric_names import LAST_ITERATE, Mode, best_mode
from lightning_feddua.wording import counted

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop


class Checkpoint(FederatedCallback):
    """Saves the run: ``last.ckpt`` to resume it and, if asked for, the best rounds as ``round-0100.ckpt``.

    The best checkpoint is the best model: its ``state_dict`` is the iterate that the monitored metric belongs to, so
    that ``load_from_checkpoint`` gives a model with that score. The run can be resumed from it as well.

    Several may keep rounds by different metrics, in the same files where they agree on a round. ``last.ckpt`` is
    written once.

    A save that fails, for want of room on the disk, say, is a warning: the checkpoint before it is still whole, and the
    rounds already done are worth more than the end of the run.

    Args:
        every: save after every so many rounds, and when the run ends; None for the end alone.
        monitor: a name in ``loop.history`` by which to choose the rounds to keep. For rules with an adaptive step, the
            plain names are metrics of the averaged iterate, and those of ``last_iterate/…`` belong to the weights. A
            name that training and validation both log means validation's.
        mode: whether the ``"min"`` or the ``"max"`` of it is best; None tells by the name, as for ``val_loss``.
        save_top_k: how many rounds to keep in files of their own: the best by ``monitor``; without it the newest, and
            for 1 no other than ``last.ckpt``. 0 keeps none and -1 all.
        save_last: whether to save ``last.ckpt`` besides. A run that is stopped or interrupted is saved in any case.
    """

    # Whether the final state is a candidate, too, where it is not its turn.
    keeps_end = True

    def __init__(
        self,
        every: int | None = 1,
        monitor: str | None = None,
        mode: Mode | None = None,
        save_top_k: int = 1,
        save_last: bool = True,
    ) -> None:
        if every is not None and every < 1:
            raise ConfigurationError(f"`every={every}` is less than 1.", "Save after every so many rounds, 1 or more.")
        check_mode(mode)
        if save_top_k < -1:
            raise ConfigurationError(
                f"`save_top_k={save_top_k}` is no number of files.", "Give how many to keep; -1 keeps all."
            )
        self.every = every
        self.monitor = monitor
        self.mode = None if monitor is None else best_mode(monitor, mode)
        self.save_top_k = save_top_k
        self.save_last = save_last
        self._folder: Path | None = None
        # After how many rounds there was something to save, and ``last.ckpt`` was.
        self._saved: int | None = None
        self._saved_last: int | None = None
        self._last: str | None = None
        self._validated = False
        # The score of each file that is kept, the smaller the better; the oldest first.
        self._scores: dict[str, float] = {}
        # Files that have lost their place, and that the `last.ckpt` on the disk may still name.
        self._outdone: set[str] = set()
        # The best score of a round that could not be saved, by what it is called.
        self._lost: dict[str, float] = {}
        # All of the loop's; the last of them writes `last.ckpt`, because it knows what the others have kept.
        self._group: list[Checkpoint] = [self]

    def share_files(self, group: list[Checkpoint]) -> None:
        """Be one of several in a loop."""
        self._group = group

    def _publish(self) -> None:
        """Tell others of the files."""

    @property
    def best_k_models(self) -> dict[str, float]:
        """The files of the best rounds, best first, with their scores; without a monitor the newest, with rounds."""
        sign = 1 if self.mode == "min" else -1
        ranked = sorted(self._scores.items(), key=lambda item: item[1])
        return {self._path(name): sign * score for name, score in ranked}

    @property
    def best_model_path(self) -> str:
        """The file of the best round; without a monitor, of the newest. Empty before the first is saved."""
        return next(iter(self.best_k_models), "" if self.monitor is not None else self.last_model_path)

    @property
    def best_model_score(self) -> float | None:
        """What the monitor said of it; None without a monitor."""
        return None if self.monitor is None else next(iter(self.best_k_models.values()), None)

    @property
    def last_model_path(self) -> str:
        """The newest file; empty before the first is saved."""
        last = LAST if self.save_last and self._group[-1]._last == LAST else self._last
        return "" if last is None else self._path(last)

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Find out, before any work, whether there is anything that cannot be saved."""
        if self.monitor is not None:
            check_monitor(loop, self, self.monitor)
        self._folder, self._saved, self._saved_last, self._validated = loop.run_dir, None, None, False
        self._outdone, self._lost = set(), {}
        exists = {name for name in (*self._scores, self._last or "") if name and (loop.run_dir / name).exists()}
        exists = broadcast_object(loop.fabric, exists)
        self._scores = {name: score for name, score in self._scores.items() if name in exists}
        self._last = self._last if self._last in exists else None
        capture(loop, {False}, lenient=self.every is None)

    def on_validation_end(self, loop: FederatedLoop, metrics: dict[str, float]) -> None:
        """From now on it is known which metrics there are."""
        self._validated = True

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Save if it is time, or if the run is about to be stopped."""
        wanted = any(one.save_last and one._is_due(round) for one in self._group)
        self._save(
            loop, self._is_due(round) and self._is_candidate(loop), (wanted or loop.stopping) and self._writes_last
        )
        self._validated = False

    def _is_due(self, round: int) -> bool:
        return self.every is not None and (round + 1) % self.every == 0

    @property
    def _writes_last(self) -> bool:
        return self is self._group[-1]

    @property
    def _saves_last(self) -> bool:
        return any(one.save_last for one in self._group)

    def on_fit_end(self, loop: FederatedLoop) -> None:
        """Save the final state, unless the last round did."""
        rounds = len(loop.history)
        ends = self._saved != rounds and self.every is not None and self.keeps_end
        stale = self._saved_last != rounds or any(one._outdone for one in self._group)
        wanted = stale and self._saves_last
        self._save(loop, ends and self._is_candidate(loop), wanted and self._writes_last)

    @property
    def saved_rounds(self) -> int | None:
        """After how many rounds ``last.ckpt`` was saved in this fit; None if it was not."""
        return self._saved_last

    def saved_now(self, rounds: int) -> bool:
        """Whether something was saved after so many rounds."""
        return self._saved == rounds

    def save_last_round(self, loop: FederatedLoop) -> None:
        """Save the state after the last whole round, unless it is; for a run that ends in the middle of the next."""
        if self._saved_last != len(loop.history):
            self._save(loop, False, True)

    def state_dict(self) -> dict[str, Any]:
        """Which files were kept, and why."""
        return {
            "monitor": self.monitor,
            "mode": self.mode,
            "scores": dict(self._scores),
            "last": self._last,
            "folder": None if self._folder is None else str(self._folder),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on comparing with files that were kept by the same metric."""
        # Before there was a choice, the mode was "min" where there was no monitor.
        known = None if state["monitor"] is None else state["mode"]
        same = (state["monitor"], known) == (self.monitor, self.mode)
        for name, score in state["scores"].items():
            # Files that lose their place are removed, so it matters which these are.
            if not self._is_own(name) or type(score) not in (int, float):
                raise ValueError(f"it names `{name!r:.100}` among the files that were kept")
        self._scores = dict(state["scores"]) if same else {}
        self._last = state.get("last")
        if not isinstance(self._last, str | None):
            raise ValueError(f"its newest file is `{self._last!r:.100}`")
        if state.get("folder") is not None:
            self._folder = Path(state["folder"])
        for one in self._group:
            one._publish()

    def file_name(self, loop: FederatedLoop, rounds: int) -> str:
        """Where a round that is kept is saved, relative to the run's folder.

        Args:
            loop: the loop.
            rounds: how many have ended.
        """
        name = round_name(rounds)
        # The same round may be kept with another iterate.
        return name if self._is_evaluated or len(self._group) == 1 else name.replace(".ckpt", "-weights.ckpt")

    def _is_own(self, name: Any) -> bool:
        """Whether a file can be one that this callback has written."""
        return isinstance(name, str) and name.endswith(".ckpt") and Path(name).name == name

    @property
    def _is_evaluated(self) -> bool:
        """Whether the iterate that is validated is what the monitored metric belongs to."""
        return self.monitor is not None and not self.monitor.startswith(f"{LAST_ITERATE}/")

    def _path(self, name: str) -> str:
        return str((self._folder or Path()) / name)

    def _is_candidate(self, loop: FederatedLoop) -> bool:
        """Whether the round may get a file of its own."""
        if self.monitor is None:
            return self.save_top_k != 1 or not self.save_last
        if not loop.history or self.save_top_k == 0:
            return False
        return monitored(loop, self, self.monitor, self._validated) is not None

    def _save(self, loop: FederatedLoop, candidate: bool, last: bool) -> None:
        if not candidate and not last:
            return
        rounds = len(loop.history)
        name = self.file_name(loop, rounds)
        before, last_before = self._scores, self._last
        if candidate:
            self._scores = kept_with(self._scores, name, self._score(loop, rounds), self.save_top_k)
        kept = candidate and name in self._scores
        self._last = LAST if last else name if kept else self._last
        # The round's own first: at no instant does `last.ckpt` name a file that is not there.
        chosen = {**({name: self._is_evaluated} if kept else {}), **({LAST: False} if last else {})}
        contents = capture(loop, set(chosen.values()), lenient=self.every is None)
        files = {file: contents[iterate] for file, iterate in chosen.items()}
        # Rank 0 alone knows whether it has worked.
        if on_rank_zero(loop.fabric, self._write, loop, files, rounds):
            self._saved, self._saved_last = rounds, rounds if last else self._saved_last
            self._outdone |= before.keys() - self._scores.keys()
            if last or not self._saves_last:
                self._remove_outdone(loop)
        else:
            self._scores, self._last = before, last_before
            if name not in before:
                self._outdone.add(name)
            if kept and last:
                # There may still be room for what the run is resumed from, which must not name the other.
                self._save(loop, False, True)
        for one in self._group:
            one._publish()

    def _remove_outdone(self, loop: FederatedLoop) -> None:
        wanted = {file for one in self._group for file in one._scores}
        for one in self._group:
            for file in one._outdone - wanted if loop.fabric.is_global_zero else ():
                (loop.run_dir / file).unlink(missing_ok=True)
            one._outdone = set()

    def _write(self, loop: FederatedLoop, checkpoints: dict[str, dict[str, Any]], rounds: int) -> bool:
        names = {loop.run_dir / name: name for name in checkpoints}
        try:
            write_all({path: checkpoints[name] for path, name in names.items()})
        except OSError as error:
            kind = self._kind(name := names[Path(error.filename)])
            loop.run.unsaved[kind] = str(error.strerror)
            if name in self._scores:
                self._lost[kind] = min(self._scores[name], self._lost.get(kind, math.inf))
            rank_zero_warn(
                f"After {counted(rounds, 'round')}, `{error.filename}` could not be saved: {error.strerror}."
                " The run continues, and the checkpoints before it are still there."
            )
            return False
        for name in checkpoints:
            # A worse round does not make up for a better one.
            if self._scores.get(name, -math.inf) <= self._lost.get(self._kind(name), math.inf):
                loop.run.unsaved.pop(self._kind(name), None)
        return True

    def _kind(self, name: str) -> str:
        """What a file is, as a later one may make up for it."""
        return LAST if name == LAST or self.monitor is None else f"the best round by {self.monitor}"

    def _score(self, loop: FederatedLoop, rounds: int) -> float:
        """Of the last round; the smaller the better."""
        if self.monitor is None:
            return -float(rounds)
        value = float(loop.history[-1][column_of(loop, self.monitor)])
        return value if self.mode == "min" else -value
