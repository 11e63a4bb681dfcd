"""How long many short runs take: one sweep, compared with as many processes of ``feddua fit``."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.benchmarks.outside import ROOT, environment
from tests.benchmarks.report import markdown

METHODS = ("FedExP", "FedDuAdagrad")
RATES = ("0.01", "0.1")
# Of the paper's synthetic task, in docs/paper.md.
PAPERS_RUNS = 600
_COMMON = ["--config", "synthetic", "--loop.compile", "true"]


def sweep_table(repetitions: int, seeds: int = 5, rounds: int = 500, workers: int = 2) -> str:
    """Seconds of all runs and of each, medians of both variants in turn, and what the paper's grids would take.

    Args:
        repetitions: how often the variants take turns.
        seeds: how many seeds of each of four points.
        rounds: of each run.
        workers: how many runs at once.
    """
    variants = {"a process of `feddua fit` for each run": _separately, "`feddua sweep`": _swept}
    found: dict[str, list[float]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as folder:
        # What is compiled is in the cache on disk when the first turn has begun; it is the same for both.
        for turn in range(repetitions + 1):
            for name, variant in variants.items():
                out = Path(folder, f"{turn}-{variant.__name__}")
                start = time.perf_counter()
                variant(out, seeds, rounds, workers)
                found[name] += [time.perf_counter() - start] * (turn > 0)
                made = len(list(out.rglob("metrics.csv")))
                assert made == len(METHODS) * len(RATES) * seeds, f"{name}: {made} runs"
    runs = len(METHODS) * len(RATES) * seeds
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    first = next(iter(medians.values()))
    rows = [
        (name, f"{all_:.1f}", f"{all_ / runs:.2f}", f"{all_ / first:.2f}", f"{PAPERS_RUNS * all_ / runs / 60:.1f}")
        for name, all_ in medians.items()
    ]
    header = [f"{runs} runs of {rounds} rounds", "seconds", "seconds a run", "ratio", f"minutes of {PAPERS_RUNS} runs"]
    return markdown(header, rows)


def _separately(out: Path, seeds: int, rounds: int, workers: int) -> None:
    points = [(method, rate, seed) for method in METHODS for rate in RATES for seed in range(seeds)]

    def fit(point: tuple[str, str, int]) -> None:
        method, rate, seed = point
        own = ["--preset", method, "--model.lr", rate, "--loop.seed", str(seed), "--data.seed", str(seed)]
        _run(["fit", *_COMMON, *own, "--loop.out_dir", str(out / "-".join(map(str, point)))], rounds)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(fit, points))


def _swept(out: Path, seeds: int, rounds: int, workers: int) -> None:
    what = ["--methods", *METHODS, "--space", f"model.lr={','.join(RATES)}", "--seeds", str(seeds)]
    _run(["sweep", *_COMMON, *what, "--jobs", str(workers), "--out", str(out)], rounds)


def _run(arguments: list[str], rounds: int) -> None:
    command = [sys.executable, "-m", "lightning_feddua", *arguments, "--loop.max_rounds", str(rounds)]
    done = subprocess.run(command, cwd=ROOT, env=environment(threads=1), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"`{' '.join(command)}` failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
