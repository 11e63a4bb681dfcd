"""Time a round of every variant, in turn, after a check that all compute the same."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.benchmarks.outside import in_ranks, outside
from tests.benchmarks.peers.environments import PEERS, interpreter
from tests.benchmarks.report import Row
from tests.benchmarks.tasks import Task
from tests.benchmarks.variants import Variant, bare_loop, by_hand, federated_loop
from tests.benchmarks.work import Work

TOLERANCE = 1e-3
# In float32, later steps multiply what rounding makes of the first.
CHECKED_STEPS = 3
BARE = "bare loop of the same steps"


def variants(
    threads: int, processes: int = 1, peers: Sequence[str] = (), venvs: Path = Path(), compile: bool = False
) -> dict[str, Variant]:
    """Everything to time, by label; the bare loop first.

    Args:
        threads: threads of one process.
        processes: where more than 1, also so many processes that share each cohort, and the threads.
        peers: other frameworks.
        venvs: the folder of their environments.
        compile: whether to time compiled local steps, too.
    """
    here = {
        BARE: bare_loop,
        "by hand on Fabric": by_hand,
        "FederatedLoop, sequential": federated_loop("sequential"),
        "FederatedLoop, vectorized": federated_loop("vectorized"),
    }
    if compile:
        here["FederatedLoop, compiled"] = federated_loop("vectorized", compile=True)
    pythons = {name: [str(interpreter(name, venvs))] for name in peers}
    settings = [(threads, 1)]
    if processes > 1:
        settings.append((max(1, threads // processes), processes))
    found = dict(here)
    for each, count in settings:
        suffix = f", {count} processes of {each} thread{'s' * (each > 1)}" if count > 1 else ""
        if count > 1:
            for label, name in ((BARE, "bare"), ("FederatedLoop, sequential", "sequential")):
                found[label + suffix] = in_ranks(name, each, count)
        for name in peers:
            peer = PEERS[name]
            if count == 1 or peer.ranks:
                runner = f"tests.benchmarks.peers.{peer.runner}"
                found[peer.label + suffix] = outside(pythons[name], runner, each, count, torchrun=peer.torchrun)
    return found


def check(work: Work, candidates: dict[str, Variant]) -> None:
    """Exit where a variant computes another update than the bare loop."""
    expected = bare_loop(work).update
    for label, variant in candidates.items():
        difference = np.linalg.norm(variant(work).update - expected) / np.linalg.norm(expected)
        # Written so that NaN is refused too.
        if not difference <= TOLERANCE:
            sys.exit(f"{work.task}: `{label}` computes another update: relative difference {difference:.1e}")


def measure(task: Task, candidates: dict[str, Variant], repetitions: int, rounds: int) -> list[Row]:
    """The median time of a round of each variant.

    Args:
        task: the task.
        candidates: the variants.
        repetitions: how often the variants take turns.
        rounds: timed rounds in each turn; one more comes before them, to warm up.
    """
    check(replace(task, steps=min(task.steps, CHECKED_STEPS)).work(rounds=1), candidates)
    work = task.work(rounds + 1)
    times: dict[str, list[float]] = {label: [] for label in candidates}
    for _ in range(repetitions):
        for label, variant in candidates.items():
            times[label] += variant(work).seconds[1:]
    return [Row(label, statistics.median(seconds)) for label, seconds in times.items()]
