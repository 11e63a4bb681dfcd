"""Which points of a space are tried, and in which order."""

from __future__ import annotations

import itertools
import math
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_feddua.errors import ConfigurationError
from lightning_feddua.experiments.jobs import make_folder, only_command
from lightning_feddua.experiments.sweep.space import Choice, Range, Settings, Space
from lightning_feddua.randomness import Purpose, generator


class Search(ABC):
    """Proposes points. The same search proposes the same points, so that an interrupted sweep can be resumed."""

    @abstractmethod
    def ask(self, count: int) -> Sequence[Settings]:
        """The next points, none when the search is over; all at once if it learns nothing from results.

        Args:
            count: how many can be tried at the same time.
        """

    @abstractmethod
    def tell(self, scores: Sequence[float]) -> None:
        """How good the points were that were asked for last: the smaller the better, infinite for a failure."""


class FixedSearch(Search):
    """Points that are known from the start."""

    def __init__(self, points: Sequence[Settings]) -> None:
        # A draw among few values may come twice.
        self._points = list({tuple(point.items()): point for point in points}.values())

    def ask(self, count: int) -> Sequence[Settings]:
        """All, then none."""
        points, self._points = self._points, []
        return points

    def tell(self, scores: Sequence[float]) -> None:
        """Nothing is learnt."""


def grid_search(space: Space) -> Search:
    """Every combination of values."""
    for key, dimension in space.items():
        if isinstance(dimension, Range):
            raise ConfigurationError(
                f"The range of `{key}` has no number of points, and a grid needs one.",
                "Add it, as in `log:0.001:0.1:5`, or choose `--search random`.",
            )
    combinations = itertools.product(*(d.values for d in space.values() if isinstance(d, Choice)))
    return FixedSearch([dict(zip(space, values, strict=True)) for values in combinations])


def random_search(space: Space, trials: int, seed: int) -> Search:
    """Independent draws. Each depends on its number and key alone: methods share draws, and more trials add to them."""

    def draw(trial: int, key: str) -> str:
        return space[key].draw(generator(seed, trial, zlib.crc32(key.encode()), Purpose.SEARCH))

    return FixedSearch([{key: draw(trial, key) for key in space} for trial in range(trials)])


class OptunaSearch(Search):
    """Optuna's tree-structured Parzen estimator, which learns from the points tried before.

    The study is kept in a file. Points that were proposed but not finished when a sweep was interrupted are
    proposed again, and the sampler's seed is a function of the number of trials, so that a resumed sweep ends like one
    that was never interrupted.

    Args:
        space: what to vary.
        trials: how many points in all.
        seed: of the sampler.
        journal: the file, which several studies may share.
        name: of the study.
    """

    def __init__(self, space: Space, trials: int, seed: int, journal: Path, name: str) -> None:
        if find_spec("optuna") is None:
            raise ConfigurationError(
                "Optuna is not installed, and `--search optuna` was asked for.",
                'Run `pip install "lightning-feddua[sweep]"`, or choose `--search random`.',
            )
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        make_folder(journal.parent)
        with only_command(journal.parent):
            _remove_half_line(journal)
            try:
                storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
                self._study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
            # Whatever is in the file is run as it is.
            except Exception as error:
                raise ConfigurationError(
                    f"Optuna's journal `{journal}` is damaged: {type(error).__name__}: {str(error).rstrip('.')}.",
                    "Move it away: the search begins anew, and runs that are finished are not run again.",
                ) from error
        self._space, self._trials, self._seed = space, trials, seed
        self._asked: list[int] | None = None

    def ask(self, count: int) -> Sequence[Settings]:
        """New points; at first also all that the file has, whose runs are there or are done again."""
        from optuna.trial import TrialState

        trials = self._study.get_trials(deepcopy=False)
        # A kill may have come while a point was written.
        halves = [trial for trial in trials if not self._space.keys() <= trial.params.keys()]
        for trial in halves:
            self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        known = [trial for trial in trials if trial not in halves] if self._asked is None else []
        points = [(trial.number, trial.params) for trial in known]
        total = len(trials)
        new = max(count - sum(not trial.state.is_finished() for trial in known), 0)
        points += [self._propose(number) for number in range(total, min(total + new, self._trials + len(halves)))]
        self._asked = [number for number, _ in points]
        return [self._settings(parameters) for _, parameters in points]

    def tell(self, scores: Sequence[float]) -> None:
        """Write into the study what it does not have."""
        from optuna.trial import TrialState

        for number, score in zip(self._asked or [], scores, strict=True):
            failed = not math.isfinite(score)
            self._study.tell(
                number,
                None if failed else score,
                state=TrialState.FAIL if failed else TrialState.COMPLETE,
                skip_if_finished=True,
            )

    def _propose(self, number: int) -> tuple[int, dict[str, Any]]:
        from optuna.samplers import TPESampler

        seed = int(generator(self._seed, number, 0, Purpose.SEARCH).integers(2**32))
        # Points in flight count as bad ones, so that those tried at the same time differ.
        self._study.sampler = TPESampler(seed=seed, constant_liar=True)
        trial = self._study.ask(self._distributions())
        return trial.number, trial.params

    def _distributions(self) -> dict[str, Any]:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        return {
            key: CategoricalDistribution(d.values)
            if isinstance(d, Choice)
            else IntDistribution(int(d.low), int(d.high))
            if d.kind == "int"
            else FloatDistribution(d.low, d.high, log=d.kind == "log")
            for key, d in self._space.items()
        }

    def _settings(self, parameters: dict[str, Any]) -> Settings:
        return {
            key: dimension.text(parameters[key]) if isinstance(dimension, Range) else parameters[key]
            for key, dimension in self._space.items()
        }


def _remove_half_line(journal: Path) -> None:
    """What a kill or a full disk has left of a line would spoil the next one, which is written behind it."""
    content = journal.read_bytes() if journal.is_file() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(journal, content.rfind(b"\n") + 1)
