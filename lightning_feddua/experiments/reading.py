"""The files of finished runs, which may be cut short or somebody else's: read as far as they make sense."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_feddua.callbacks import CSVLog
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.launch.run_folders import newest_version
from lightning_feddua.metric_names import CERTIFICATE
from lightning_feddua.plain_yaml import load_yaml

# In the folder of a run that is one of many: what is to be run; and, when it is over, which version holds the results,
# or in which round it diverged.
JOB_FILE = "job.yaml"
FINISHED_FILE = "finished.json"

Columns = dict[str, tuple[np.ndarray, np.ndarray]]

_MOST_BYTES = 1 << 30
_MOST_COLUMNS = 10_000
_MOST_JSON_BYTES = 10_000_000
_MOST_ROUNDS = 1 << 53


def read_json(path: Path) -> dict[str, Any]:
    """A mapping from a file that may be missing or incomplete; then it is empty."""
    try:
        content = json.loads(path.read_text("utf-8")) if path.stat().st_size <= _MOST_JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_recipe(path: Path) -> dict[str, Any]:
    """The recipe of a run; empty, with a warning that names the folder, if it is not as it was saved."""
    try:
        content = load_yaml(path)
        if isinstance(content, dict) and all(isinstance(name, str) for name in content):
            return content
        problem = f"it holds a `{type(content).__name__}`"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problem = _told(error)
    rank_zero_warn(f"The `{path.name}` in `{path.parent}` is damaged: {problem}. The run is shown without it.")
    return {}


def read_columns(path: Path) -> Columns:
    """The columns of a log as rounds and values; none, with a warning that names the folder, if it is no log."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        return _columns(path.read_text("utf-8"))
    except (OSError, ValueError, csv.Error) as error:
        rank_zero_warn(f"The `{path.name}` in `{path.parent}` is damaged: {_told(error)}. The run is left out.")
    return {}


def _told(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()).rstrip(".")[:200]


def _columns(text: str) -> Columns:
    # The last line may be half written during the run.
    lines = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    names = next(lines, [])
    if "round" not in names or len(set(names)) < len(names) or len(names) > _MOST_COLUMNS:
        if not text[: text.rfind("\n") + 1]:
            return {}
        raise ValueError("its first line is not the columns' names")
    place = names.index("round")
    # A line that was cut short does not count, and of a round that is there twice, the last does.
    cells = {_round(row[place]): row for row in lines if len(row) == len(names)}
    cells.pop(None, None)
    rounds = sorted(one for one in cells if one is not None)
    columns = {}
    for column, name in enumerate(names):
        values = [(number, _number(cells[number][column])) for number in rounds] if name != CERTIFICATE else []
        # What is no number has been logged by somebody's callback.
        known = [(number, value) for number, value in values if value is not None]
        if known:
            columns[name] = (np.array([number for number, _ in known]), np.array([value for _, value in known]))
    return columns


def _round(cell: str) -> int | None:
    number = _number(cell)
    return int(number) if number is not None and 0 <= number < _MOST_ROUNDS and number == int(number) else None


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def find_runs(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """The runs in a folder and below it, with the method's name where it is one of many runs, in ``METHOD/seed_S``.

    Raises:
        ConfigurationError: a folder cannot be read.
    """
    # Not by recursion: folders may be deeper than Python goes. A link may lead back up.
    waiting, seen = [folder], set()
    while waiting:
        here = waiting.pop()
        try:
            status = here.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            if (here / CSVLog.FILE_NAME).is_file():
                yield here, _method_of(here.parent) if (here.parent / JOB_FILE).is_file() else None
            elif (here / JOB_FILE).is_file():
                if (version := _result_of(here)) is not None:
                    yield version, _method_of(here)
            elif here.is_dir():
                waiting += sorted((Path(one.path) for one in os.scandir(here) if one.is_dir()), reverse=True)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigurationError(
                f"The folder `{here}` cannot be read: {error.strerror or error}.", "Make it readable, or name others."
            ) from error


def _method_of(job: Path) -> str:
    """The name of the method, which may have more in it than the name of its folder can."""
    known = read_json(job / FINISHED_FILE).get("method")
    return known if isinstance(known, str) and known else job.absolute().parent.name


def _result_of(job: Path) -> Path | None:
    """Versions that were interrupted or had another recipe stay on the disk, and are not results."""
    mark = read_json(job / FINISHED_FILE)
    if "diverged" in mark:
        return None
    version = newest_version(job)
    if "version" in mark:
        name = str(mark["version"])
        # It is a name, and no way to elsewhere.
        version = job / name if Path(name).name == name else None
    return version if version is not None and (version / CSVLog.FILE_NAME).is_file() else None
