"""Variants that run outside this process: several ranks, or another framework in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.variants import Variant
from tests.benchmarks.work import Timing, Work

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def environment(threads: int) -> dict[str, str]:
    """For a process that finds this package, with so many threads."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}


def in_ranks(variant: str, threads: int, processes: int) -> Variant:
    """One of this project's variants with each cohort shared by several processes.

    Args:
        variant: ``"bare"``, or the name of an engine.
        threads: threads of each process.
        processes: how many.
    """
    return outside([sys.executable], "tests.benchmarks.ranks", threads, processes, [variant])


def outside(
    python: list[str], module: str, threads: int, processes: int, more: list[str] | None = None, torchrun: bool = True
) -> Variant:
    """A variant that a runner times in processes of its own.

    Args:
        python: the interpreter.
        module: the runner.
        threads: threads of each process.
        processes: how many share each cohort.
        more: further arguments of the runner.
        torchrun: whether torchrun starts the processes, or the runner does it itself.
    """
    launcher = [*TORCHRUN, f"--nproc-per-node={processes}"]

    def run(work: Work) -> Timing:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / "work.npz", Path(folder) / "update.npy"]
            work.save(files[0])
            command = [*python, *(launcher if torchrun and processes > 1 else []), "-m", module, *map(str, files)]
            command += [f"--threads={threads}", f"--processes={processes}", *(more or [])]
            finished = subprocess.run(command, cwd=ROOT, env=environment(threads), capture_output=True, text=True)
            if finished.returncode:
                sys.exit(f"`{module}` failed:\n{finished.stdout[-3000:]}\n{finished.stderr[-3000:]}")
            return Timing.received(finished.stdout, files[1])

    return run
