"""How time and memory grow with clients a round, ranks, population and parameters."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

from lightning_feddua import FedDuAdagrad, FedDuAdam, FedDuAServer, RoundUpdate
from lightning_feddua.servers import passes
from tests.benchmarks.outside import ROOT, environment, in_ranks
from tests.benchmarks.population import KINDS
from tests.benchmarks.report import markdown
from tests.benchmarks.tasks import TASKS

SERVERS: tuple[type[FedDuAServer], ...] = (FedDuAdagrad, FedDuAdam)


def scaling_tables(rounds: int) -> Iterator[tuple[str, str]]:
    """All tables with their titles, each when it is ready.

    Args:
        rounds: timed rounds of each entry.
    """
    yield "Clients a round and ranks, one thread each", cohort_table((1, 2), (10, 100, 1000), rounds)
    yield "Population, cohorts of 1,000", population_table(KINDS, [10**k for k in range(2, 7)])
    yield "Server step", server_table([10**3, 10**4, 10**5, 10**6, 11_200_000, 10**8], repetitions=9)


def cohort_table(ranks: Sequence[int], cohorts: Sequence[int], rounds: int) -> str:
    """Seconds of a round, and milliseconds of each client in it."""
    rows = []
    for cohort in cohorts:
        work = replace(TASKS["many"], clients_per_round=cohort).work(rounds + 1)
        for count in ranks:
            median = statistics.median(in_ranks("sequential", 1, count)(work).seconds[1:])
            rows.append((count, cohort, f"{median:.4f}", f"{1000 * median / cohort:.3f}"))
    return markdown(["ranks", "clients a round", "seconds a round", "ms a client"], rows)


def population_table(kinds: Sequence[str], populations: Sequence[int]) -> str:
    """Sampling, start-up, memory and the number of datasets made, each entry in a fresh process."""
    rows = []
    for kind in kinds:
        for population in populations:
            command = [sys.executable, "-m", "tests.benchmarks.population", kind, str(population)]
            finished = subprocess.run(
                command, cwd=ROOT, env=environment(threads=1), capture_output=True, text=True, check=True
            )
            found = json.loads(finished.stdout.strip().splitlines()[-1])
            times = f"{1000 * found['sampling']:.2f}", f"{found['start']:.2f}"
            rows.append((kind, f"{population:,}", *times, f"{found['memory']:.0f}", f"{found['made']:,}"))
    return markdown(["clients", "population", "sampling (ms)", "start (s)", "peak memory (MB)", "datasets made"], rows)


def server_table(sizes: Sequence[int], repetitions: int) -> str:
    """Milliseconds of a server step, in place and compiled, and their ratio to a copy of a vector of the same size."""
    kinds = list(itertools.product(SERVERS, (False, True)))
    rows = []
    for d in sizes:
        weights, target, spare = torch.randn(d), torch.empty(d), torch.empty(d)
        update = RoundUpdate(torch.randn(d), torch.ones(20, dtype=torch.float64), spare=spare)
        servers = [rule() for rule, _ in kinds]
        for server, (_, compiled) in zip(servers, kinds, strict=True):
            server.set_up(layout=None, compile=compiled)
        steps = [partial(server.step, weights, update) for server in servers]
        # Small vectors, too, to see from what size on compilation pays.
        with patch.object(passes, "COMPILED_SERVER_SIZE", 0):
            copy, *seconds = _median_seconds([partial(target.copy_, weights), *steps], repetitions)
        cells = [cell for step in seconds for cell in (f"{1000 * step:.3f}", f"{step / copy:.1f}")]
        rows.append([f"{d:,}", f"{1000 * copy:.4f}", *cells])
    names = [f"{rule.__name__}{' compiled' * compiled} (ms)" for rule, compiled in kinds]
    return markdown(["d", "copy (ms)", *(column for name in names for column in (name, "in copies"))], rows)


def _median_seconds(functions: Sequence[Callable[[], object]], repetitions: int) -> list[float]:
    """The median time of a call of each, in turn, after two that warm up; short ones fill a millisecond or so."""
    calls = []
    for function in functions:
        function()
        begin = time.perf_counter()
        function()
        calls.append(max(1, int(1e-3 / (time.perf_counter() - begin))))
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repetitions):
        for function, count, own in zip(functions, calls, times, strict=True):
            begin = time.perf_counter()
            for _ in range(count):
                function()
            own.append((time.perf_counter() - begin) / count)
    return [statistics.median(own) for own in times]
