"""Where the time of a round goes: into local steps, and into everything around them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed

from lightning_feddua import FederatedCallback, FederatedLoop
from lightning_feddua.callbacks.certify import Certify
from tests.benchmarks.outside import ROOT, TORCHRUN, environment
from tests.benchmarks.report import markdown
from tests.benchmarks.tasks import TASKS, Task
from tests.benchmarks.variants import federated_loop

# What a round is made of. The engine's part is all of it that is not a step: loading weights, drawing and gathering
# minibatches, seeding, deltas. The rest is what nothing else accounts for: callbacks, buffers, logging. Waiting is for
# ranks that have more to do, or are slower.
PARTS = ("local steps", "sampling", "engine", "reduction", "server", "certificate", "rest", "waiting")
Parts = dict[str, float]


class Stopwatch(FederatedCallback):
    """Times the parts of each round by wrapping the loop's own functions; a part inside another counts once."""

    def __init__(self) -> None:
        # The first is what comes before the rounds.
        self.rounds: list[Counter[str]] = [Counter()]
        self._running: list[str] = []
        self._since = 0.0

    def on_fit_start(self, loop: FederatedLoop) -> None:
        simulation = loop.backend
        engine, reduction = simulation._engine, simulation._reduction
        self._wrap(engine if engine.in_lanes else engine._steps, "_step", "local steps")
        for name in ("_deal", "_own_clients"):
            self._wrap(simulation, name, "sampling")
        self._wrap(loop, "_sample", "sampling")
        for name in ("start", "add", "all_reduce"):
            self._wrap(reduction, name, "reduction")
        if loop.fabric.world_size > 1:
            all_reduce = reduction.all_reduce

            def after_waiting(*args: Any) -> Any:
                self._call("waiting", torch.distributed.barrier)
                return all_reduce(*args)

            reduction.all_reduce = after_waiting
        self._wrap(loop.server, "step", "server")
        (certify,) = (callback for callback in loop.callbacks if isinstance(callback, Certify))
        self._wrap(certify, "on_round_end", "certificate")
        run = engine.run

        def timed_run(*args: Any) -> Iterator[Any]:
            updates = run(*args)
            while (update := self._call("engine", next, updates, None)) is not None:
                yield update

        engine.run = timed_run
        run_round = loop._run_round

        def timed_round(*args: Any) -> None:
            self.rounds.append(Counter())
            self._call("rest", run_round, *args)

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


def overhead_table(rows: Sequence[tuple[Task, str, int]], rounds: int) -> str:
    """Milliseconds of a round and of its parts, and what is neither local steps nor waiting for another rank.

    Args:
        rows: a task, an engine and a number of ranks each; one rank has all threads, several have one each.
        rounds: timed rounds, after one that warms up.
    """
    cells = []
    for task, engine, ranks in rows:
        parts = parts_of_a_round(task, engine, rounds) if ranks == 1 else parts_on_ranks(task, engine, rounds, ranks)[0]
        whole = sum(parts.values())
        outside = whole - parts["local steps"] - parts["waiting"]
        times = [f"{1000 * parts[part]:.2f}" for part in PARTS]
        certificate, share = (f"{100 * part / whole:.2f} %" for part in (parts["certificate"], outside))
        cells.append(
            [task.name, engine, ranks, f"{1000 * whole:.1f}", *times, certificate, f"{1000 * outside:.2f}", share]
        )
    return markdown(
        ["task", "engine", "ranks", "round (ms)", *PARTS, "certificate (%)", "outside local steps", "share"], cells
    )


def skew_table(rounds: int) -> str:
    """How evenly two ranks share a cohort in which one client has ten times the samples of each other."""
    task = TASKS["skewed"]
    found = parts_on_ranks(task, "sequential", rounds, 2)
    wholes = [sum(parts.values()) for parts in found]
    busy = [whole - parts["waiting"] for whole, parts in zip(wholes, found, strict=True)]
    ideal = sum(busy) / len(busy)
    cells = [f"{1000 * seconds:.1f}" for seconds in (*busy, ideal, max(wholes))]
    header = ["rank 0 busy (ms)", "rank 1 busy (ms)", "ideal split (ms)", "round (ms)", "round / ideal"]
    return markdown(header, [[*cells, f"{max(wholes) / ideal:.3f}"]])


def parts_of_a_round(task: Task, engine: str, rounds: int) -> Parts:
    """The median seconds of each part of a round, on this rank."""
    stopwatch = Stopwatch()
    federated_loop(engine, [stopwatch])(task.work(rounds + 1))
    return {part: statistics.median(round[part] for round in stopwatch.rounds[2:]) for part in PARTS}


def parts_on_ranks(task: Task, engine: str, rounds: int, ranks: int) -> list[Parts]:
    """The same on each of several ranks, which torchrun starts with a thread each."""
    what = [task.name, engine, str(rounds), str(task.steps)]
    command = [sys.executable, *TORCHRUN, f"--nproc-per-node={ranks}", "-m", "tests.benchmarks.overhead", *what]
    finished = subprocess.run(command, cwd=ROOT, env=environment(threads=1), capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"The overhead on {ranks} ranks could not be measured:\n{finished.stderr[-3000:]}")
    return json.loads(finished.stdout.strip().splitlines()[-1])


def main() -> None:
    """What torchrun starts."""
    name, engine, rounds, steps = sys.argv[1:]
    parts = parts_of_a_round(replace(TASKS[name], steps=int(steps)), engine, int(rounds))
    gathered: list[Parts] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, parts)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(gathered), flush=True)


if __name__ == "__main__":
    main()
