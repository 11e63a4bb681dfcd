"""Many runs of ``feddua fit`` in parallel processes: each in a folder of its own, none done twice."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_feddua._private import COMPILER_MODULES
from lightning_feddua.callbacks import CSVLog
from lightning_feddua.errors import ConfigurationError, NotFiniteError
from lightning_feddua.experiments.job_process import Lifeline, check_can_fork, end, lifeline, start
from lightning_feddua.experiments.live_display import LiveDisplay, RunProgress
from lightning_feddua.experiments.reading import FINISHED_FILE, JOB_FILE, read_json
from lightning_feddua.files import whole_file
from lightning_feddua.launch.fabric import leave_process_group
from lightning_feddua.launch.run_folders import newest_version
from lightning_feddua.locks import locked
from lightning_feddua.metric_names import CERTIFICATE

LOG_FILE = "log.txt"
_LOCK_FILE = ".lock"
_LOCK_SECONDS, _REFRESH_SECONDS = 5.0, 0.5


@dataclass(frozen=True)
class Job:
    """A run to be done.

    Args:
        name: what to call it.
        folder: its own folder; results are in a ``version_N`` below it.
        recipe: the resolved recipe.
        method: which method it is a run of, if its folder cannot be called that.
    """

    name: str
    folder: Path
    recipe: Mapping[str, Any]
    method: str = ""

    @property
    def fingerprint(self) -> str:
        """A hash of the recipe, but for where results go."""
        loop = {key: value for key, value in self.recipe["loop"].items() if key != "out_dir"}
        text = json.dumps({**self.recipe, "loop": loop}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def finished(self) -> bool:
        """Whether it has been done, with this very recipe."""
        return (self.folder / str(self._mark().get("version")) / CSVLog.FILE_NAME).is_file()

    @property
    def diverged(self) -> bool:
        """Whether it has been tried, with this very recipe, and an update was not finite."""
        return "diverged" in self._mark()

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self.folder / LOG_FILE

    def _mark(self) -> dict[str, Any]:
        """What its process has left behind; nothing if that had another recipe."""
        mark = read_json(self.folder / FINISHED_FILE)
        return mark if mark.get("recipe_sha256") == self.fingerprint else {}


@dataclass
class _Running:
    job: Job
    process: BaseProcess
    slot: int
    # Versions from before are not this run's.
    earlier: Path | None
    start: float = field(default_factory=time.monotonic)

    def progress(self) -> RunProgress:
        """How far it has come, by its log."""
        version = newest_version(self.job.folder)
        row = {}
        if version is not None and version != self.earlier and (version / CSVLog.FILE_NAME).is_file():
            row = _last_row(version / CSVLog.FILE_NAME)
        rounds = int(row["round"]) + 1 if row else 0
        seconds = time.monotonic() - self.start
        return RunProgress(self.job.name, rounds, self.job.recipe["loop"]["max_rounds"], row, seconds)


def run_jobs(
    jobs: Sequence[Job],
    root: Path,
    workers: int | None,
    display: LiveDisplay,
    check: Callable[[Job], None] = lambda job: None,
    reuse_diverged: bool = False,
) -> list[Job]:
    """Do all jobs that are not done yet; a failed one does not stop the others.

    Each job has a process of its own, forked from this one: it does not pay for imports again, and nothing that another
    job has done to its process can change its result. The caller must not have used a GPU. All processes end with this
    one, however it ends.

    Args:
        jobs: what to do.
        root: a folder above all jobs' folders, in which only one process at a time may be at work.
        workers: how many run at once; None for one per device, or per core where there are only cores.
        display: where progress is shown.
        check: called with each finished job; an error of its ends all, before more is done in vain.
        reuse_diverged: whether a job that diverged before has been done, too.

    Returns:
        The jobs that failed, be it that they diverged, now or before.
    """
    if TorchElasticEnvironment.detect():
        raise ConfigurationError("torchrun started a command that starts processes itself.", "Leave torchrun out.")
    check_can_fork()
    devices = _count_devices(job.recipe for job in jobs)
    workers = workers or devices or _count_cores()
    make_folder(root)
    # Forked children do not hold the lock, and end with this process.
    with only_command(root):
        finished = [job for job in jobs if job.finished]
        for job in finished:
            check(job)
        diverged = [job for job in jobs if reuse_diverged and job.diverged]
        waiting = deque(job for job in jobs if job not in finished and job not in diverged)
        display.start(total=len(jobs), reused=len(jobs) - len(waiting))
        if any(job.recipe["loop"].get("compile") for job in waiting):
            for name in COMPILER_MODULES:
                import_module(name)
        if workers > 1:
            # So that none is left alone at the end.
            waiting = deque(sorted(waiting, key=_work_of, reverse=True))
        return diverged + _run_all(waiting, workers, devices, display, check)


def make_folder(root: Path) -> None:
    """Make the folder of many runs, or give one clear error."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / _LOCK_FILE).touch()
    except OSError as error:
        raise ConfigurationError(
            f"The folder `{root}` cannot be written: {error.strerror}.", "Choose another with `--out`."
        ) from error


@contextmanager
def only_command(root: Path) -> Iterator[None]:
    """Be the only one at work in a folder of many runs, or give one clear error."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(root / _LOCK_FILE, _LOCK_SECONDS))
        except BlockingIOError:
            raise ConfigurationError(
                f"Another command is at work in `{root}`.", "Wait for its end, or choose another folder."
            ) from None
        yield


def _run_all(
    waiting: deque[Job], workers: int, devices: int, display: LiveDisplay, check: Callable[[Job], None]
) -> list[Job]:
    running: dict[int, _Running] = {}
    slots = list(range(workers))
    failed = []
    with lifeline() as ends:
        try:
            while waiting or running:
                while waiting and slots:
                    started = _start(waiting.popleft(), slots.pop(0), devices, ends)
                    running[started.process.sentinel] = started
                display.show([one.progress() for one in running.values()])
                for sentinel in wait(list(running), timeout=_REFRESH_SECONDS):
                    ended = running.pop(sentinel)  # type: ignore[arg-type]
                    progress = ended.progress()
                    code = end(ended.process)
                    slots.append(ended.slot)
                    if code == 0:
                        display.finished(progress)
                        check(ended.job)
                    else:
                        failed.append(ended.job)
                        display.failed(ended.job.name, _last_words(ended.job.log), ended.job.log)
        finally:
            for left in running.values():
                end(left.process)
            display.close()
    return failed


def _work_of(job: Job) -> float:
    """How long a job takes, compared with others of the same model and data."""
    loop, data = job.recipe["loop"], job.recipe.get("data", {}).get("init_args") or {}
    # Where all clients take part, the data may say how many there are.
    known = (loop.get("clients_per_round"), data.get("num_clients"))
    clients = next((count for count in known if isinstance(count, int)), 1)
    return loop["max_rounds"] * clients * (loop.get("local_steps") or loop.get("local_epochs") or 1)


def _start(job: Job, slot: int, devices: int, ends: Lifeline) -> _Running:
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / FINISHED_FILE).unlink(missing_ok=True)
    with whole_file(job.folder / JOB_FILE) as file:
        yaml.safe_dump(dict(job.recipe), file, sort_keys=False)
    earlier = newest_version(job.folder)
    process = start(partial(_work, job, _fit_arguments(job, slot, devices)), job.log, ends)
    return _Running(job, process, slot, earlier)


def _fit_arguments(job: Job, slot: int, devices: int) -> list[str]:
    arguments = ["fit", "--config", str(job.folder / JOB_FILE)]
    if devices and job.recipe["loop"]["devices"] == "auto":
        arguments += ["--loop.devices", f"[{slot % devices}]"]
    return arguments


def _work(job: Job, arguments: list[str]) -> int:
    """What a job's process does: an ordinary ``feddua fit``, then the mark that it is over."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # Fabric starts further ranks by the command line of this process.
    sys.argv[1:] = arguments
    from lightning_feddua.cli import main

    mark: dict[str, Any] = {"recipe_sha256": job.fingerprint, "method": job.method}
    try:
        code = main(arguments)
    except NotFiniteError as error:
        traceback.print_exc()
        code, mark["diverged"] = 1, error.round
    if code == 0:
        version = newest_version(job.folder)
        assert version is not None
        mark["version"] = version.name
    if {"diverged", "version"} & mark.keys():
        with whole_file(job.folder / FINISHED_FILE) as file:
            json.dump(mark, file, indent=2)
    leave_process_group()
    return code


def default_workers(recipes: Iterable[Mapping[str, Any]]) -> int:
    """How many runs of such recipes there are at once: one per device, or per core where there are only cores."""
    return _count_devices(recipes) or _count_cores()


def _count_devices(recipes: Iterable[Mapping[str, Any]]) -> int:
    """Accelerators that the recipes would use; 0 for a CPU."""
    asked = {recipe["loop"]["accelerator"] for recipe in recipes}
    for accelerator, names in ((CUDAAccelerator, {"auto", "gpu", "cuda"}), (MPSAccelerator, {"auto", "gpu", "mps"})):
        if asked & names and accelerator.is_available():
            return accelerator.auto_device_count()
    return 0


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _last_row(path: Path) -> dict[str, float]:
    """The numbers in the last complete line of a log, without reading all of it."""
    with path.open("rb") as file:
        names = next(csv.reader([file.readline().decode(errors="replace")]), [])
        file.seek(max(file.tell(), path.stat().st_size - 100 * len(names)))
        lines = file.read().decode(errors="replace").split("\n")[:-1]
    cells = next(csv.reader(lines[-1:]), [])
    row = {}
    if len(cells) == len(names):
        for name, cell in zip(names, cells, strict=True):
            # Somebody's callback may log what is no number.
            with suppress(ValueError):
                row[name] = float(cell)
    row.pop(CERTIFICATE, None)
    return row if "round" in row else {}


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.is_file() else []
    return lines[-1].strip() if lines else "it was killed before it said anything"
