"""Where the time of a round goes: into local steps, and into everything around them."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import lightning_feddua.loop
from lightning_feddua import FederatedCallback, FederatedLoop
from tests.benchmarks.report import markdown
from tests.benchmarks.tasks import Task
from tests.benchmarks.variants import federated_loop

# What a round is made of. The engine's part is all of it that is not a step: loading weights, drawing and gathering
# minibatches, seeding, deltas. The rest is what nothing else accounts for: callbacks, buffers, logging.
PARTS = ("local steps", "sampling", "engine", "reduction", "server", "rest")


class Stopwatch(FederatedCallback):
    """Times the parts of each round by wrapping the loop's own functions; a part inside another counts once."""

    def __init__(self) -> None:
        # The first is what comes before the rounds.
        self.rounds: list[Counter[str]] = [Counter()]
        self._running: list[str] = []
        self._since = 0.0

    def on_fit_start(self, loop: FederatedLoop) -> None:
        training = loop._training
        engine, reduction = training._engine, training._reduction
        self._wrap(getattr(engine, "_steps", engine), "_step", "local steps")
        for name in ("_deal", "_own_clients"):
            self._wrap(training, name, "sampling")
        for name in ("start", "add", "all_reduce"):
            self._wrap(reduction, name, "reduction")
        self._wrap(loop.server, "step", "server")
        run = engine.run

        def timed_run(*args: Any) -> Iterator[Any]:
            updates = run(*args)
            while (update := self._call("engine", next, updates, None)) is not None:
                yield update

        engine.run = timed_run
        run_round = loop._run_round

        def timed_round(round: int) -> None:
            self.rounds.append(Counter())
            self._call("rest", run_round, round)

        loop._run_round = timed_round

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: self._call(part, function, *args, **kwargs))

    def _call(self, part: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._switch()
        self._running.append(part)
        try:
            return function(*args, **kwargs)
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        """Give the time since the last switch to the innermost part."""
        now = time.perf_counter()
        if self._running:
            self.rounds[-1][self._running[-1]] += now - self._since
        self._since = now


def overhead_table(tasks: list[Task], engines: list[str], rounds: int) -> str:
    """A row for each task and engine: milliseconds of a round and of its parts, and the share that is not local steps.

    Args:
        tasks: what to run.
        engines: how.
        rounds: timed rounds, after one that warms up.
    """
    rows = []
    for task in tasks:
        for engine in engines:
            parts = parts_of_a_round(task, engine, rounds)
            whole = sum(parts.values())
            share = 1 - parts["local steps"] / whole
            times = [f"{1000 * parts[part]:.2f}" for part in PARTS]
            rows.append([task.name, engine, f"{1000 * whole:.1f}", *times, f"{100 * share:.1f} %"])
    return markdown(["task", "engine", "round (ms)", *PARTS, "outside local steps"], rows)


def parts_of_a_round(task: Task, engine: str, rounds: int) -> dict[str, float]:
    """The median seconds of each part of a round."""
    stopwatch, sample_cohort = Stopwatch(), lightning_feddua.loop.sample_cohort
    lightning_feddua.loop.sample_cohort = lambda *args: stopwatch._call("sampling", sample_cohort, *args)
    try:
        federated_loop(engine, [stopwatch])(task.work(rounds + 1))
    finally:
        lightning_feddua.loop.sample_cohort = sample_cohort
    return {part: statistics.median(round[part] for round in stopwatch.rounds[2:]) for part in PARTS}
