"""A folder for each run, and one run at a time in it."""

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning.fabric import Fabric

from lightning_feddua.aggregation.collectives import on_rank_zero
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.files import locked

# The resolved recipe, beside the results.
RECIPE_FILE = "recipe.yaml"


@contextmanager
def temporary_run_dir(fabric: Fabric) -> Iterator[Path]:
    """A folder that is gone after the run, on every rank; rank 0 alone writes to it."""
    with ExitStack() as stack:
        yield on_rank_zero(fabric, lambda: Path(stack.enter_context(TemporaryDirectory(prefix="fast_dev_run_"))))


@contextmanager
def open_run_dir(fabric: Fabric, out_dir: Path, existing: Path | None = None) -> Iterator[Path]:
    """The folder of a run, kept from other runs for as long as this one lasts; every rank gets it, or the same error.

    Args:
        fabric: for the exchange; rank 0 alone touches files.
        out_dir: where runs are kept.
        existing: the folder of a resumed run; None for the first free ``out_dir/version_N``.
    """
    stack = ExitStack()

    def open_folder() -> Path:
        try:
            path = _make_next_version(out_dir) if existing is None else existing
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            stack.enter_context(locked(path))
        except BlockingIOError:
            raise ConfigurationError(
                f"The run in `{existing}` is still being continued by another process.",
                "Wait for its end, or give another `out_dir`.",
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"The folder `{existing or out_dir}` cannot be written: {error.strerror or error}.",
                "Give a writable folder as `out_dir`.",
            ) from error
        return path

    with stack:
        yield on_rank_zero(fabric, open_folder)


def versions(out_dir: Path) -> list[Path]:
    """The folders of runs, newest first."""
    numbers = {path: path.name.removeprefix("version_") for path in out_dir.glob("version_*")}
    folders = [path for path, number in numbers.items() if number.isdecimal() and path.is_dir()]
    return sorted(folders, key=lambda path: -int(numbers[path]))


def newest_version(out_dir: Path) -> Path | None:
    """The folder of the newest run, if there is one."""
    return next(iter(versions(out_dir)), None)


def _make_next_version(out_dir: Path) -> Path:
    out_dir.mkdir(parents=True, exist_ok=True)
    newest = newest_version(out_dir)
    first = 0 if newest is None else int(newest.name.removeprefix("version_")) + 1
    for number in itertools.count(first):
        path = out_dir / f"version_{number}"
        try:
            # Fails if another run has just taken it.
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError
