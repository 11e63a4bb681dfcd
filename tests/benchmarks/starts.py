"""How long a command takes to start, compared with the import of Lightning that none which trains can do without."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from tests.benchmarks.outside import ROOT, environment
from tests.benchmarks.report import markdown

LIGHTNING = "import lightning.pytorch"
_FEDDUA = [sys.executable, "-m", "lightning_feddua"]
_FIT = [*_FEDDUA, "fit", "--config", "synthetic", "--loop.out_dir", "{folder}", "--loop.callbacks"]
STARTS = {
    LIGHTNING: [sys.executable, "-c", LIGHTNING],
    "feddua --version": [*_FEDDUA, "--version"],
    "feddua --help": [*_FEDDUA, "--help"],
    "feddua fit --help": [*_FEDDUA, "fit", "--help"],
    "feddua fit --config synthetic, to its first round": [*_FIT, f"{__name__}.EndAtFirstRound"],
    "the same, to the end of its first round": [*_FIT, f"{__name__}.EndAfterFirstRound"],
}


def __getattr__(name: str) -> Any:
    """The callbacks; their base class is imported only where a run asks for one of them."""
    hooks = {"EndAtFirstRound": "on_round_start", "EndAfterFirstRound": "on_round_end"}
    if name not in hooks:
        raise AttributeError(name)
    from lightning_feddua import FederatedCallback

    # Without what a process does at its end, which the next command need not wait for.
    return type(name, (FederatedCallback,), {hooks[name]: lambda *_: os._exit(0), "__module__": __name__})


def startup_table(repetitions: int, starts: Mapping[str, list[str]] = STARTS) -> str:
    """Seconds from the start of a process to its end, by the clock and of work, medians of processes in turn.

    Args:
        repetitions: how many processes of each.
        starts: the command lines by what they are called; ratios are to the first.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory() as folder:
        # The first of each fills the caches of the system and of Python, and is not counted.
        for turn in range(repetitions + 1):
            for name, command in starts.items():
                taken = _timed([part.format(folder=folder) for part in command])
                found[name] += [taken] * (turn > 0)
    medians = {name: [statistics.median(one) for one in zip(*taken, strict=True)] for name, taken in found.items()}
    clock, work = next(iter(medians.values()))
    # A process may end before its work is noticed.
    work = max(work, 0.01)
    rows = [(name, f"{c:.2f}", f"{c / clock:.2f}", f"{w:.2f}", f"{w / work:.2f}") for name, (c, w) in medians.items()]
    return markdown(["command", "seconds", "ratio", "seconds of a core", "ratio"], rows)


def _timed(command: list[str]) -> tuple[float, float]:
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=environment(threads=1), stdout=subprocess.DEVNULL, check=True)
    seconds, after = time.perf_counter() - start, os.times()
    return seconds, (after.children_user - before.children_user + after.children_system - before.children_system)
