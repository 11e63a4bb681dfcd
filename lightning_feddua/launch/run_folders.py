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
from lightning_feddua.locks import locked

# The resolved recipe, beside the results.
RECIPE_FILE = "recipe.yaml"
_PREFIX = "version_"


@contextmanager
def temporary_run_dir(fabric: Fabric) -> Iterator[Path]:
    """A folder that is gone after the run, on every rank; rank 0 alone writes to it."""
    with ExitStack() as stack:
        yield on_rank_zero(fabric, lambda: Path(stack.enter_context(TemporaryDirectory(prefix="fast_dev_run_"))))


@contextmanager
def open_run_dir(fabric: Fabric, out_dir: Path, held: Path | None = None) -> Iterator[Path]:
    """The folder of a run, kept from other runs for as long as this one lasts; every rank gets it, or the same error.

    Args:
        fabric: for the exchange; rank 0 alone touches files.
        out_dir: where runs are kept.
        held: the folder of a resumed run, which others are kept from already; None for a new ``out_dir/version_N``.
    """
    if held is not None:
        yield held
        return
    with ExitStack() as stack:
        yield on_rank_zero(fabric, lambda: _hold_next_version(out_dir, stack))


def hold(run_dir: Path, stack: ExitStack) -> None:
    """Keep other runs from a folder until a stack is closed; whatever is read in it from now on stays as it is.

    Raises:
        ConfigurationError: another run is at work in it, or it cannot be written.
    """
    try:
        if not os.access(run_dir, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        stack.enter_context(locked(run_dir))
    except BlockingIOError:
        raise ConfigurationError(
            f"The run in `{run_dir}` is still being continued by another process.",
            "Wait for its end, or give another `out_dir`.",
        ) from None
    except OSError as error:
        raise _not_writable(run_dir, error) from error


def _not_writable(folder: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"The folder `{folder}` cannot be written: {error.strerror or error}.", "Give a writable folder as `out_dir`."
    )


def _hold_next_version(out_dir: Path, stack: ExitStack) -> Path:
    try:
        path = _make_next_version(out_dir)
    except OSError as error:
        raise _not_writable(out_dir, error) from error
    hold(path, stack)
    return path


def versions(out_dir: Path) -> Iterator[Path]:
    """The folders of runs, newest first."""
    # There may be thousands, so that one look at each would be too many.
    names = os.listdir(out_dir) if out_dir.is_dir() else []
    numbers = ((name.removeprefix(_PREFIX), name) for name in names if name.startswith(_PREFIX))
    for _, name in sorted(((int(number), name) for number, name in numbers if number.isdecimal()), reverse=True):
        if (path := out_dir / name).is_dir():
            yield path


def newest_version(out_dir: Path) -> Path | None:
    """The folder of the newest run, if there is one."""
    return next(versions(out_dir), None)


def _make_next_version(out_dir: Path) -> Path:
    out_dir.mkdir(parents=True, exist_ok=True)
    newest = newest_version(out_dir)
    first = 0 if newest is None else int(newest.name.removeprefix(_PREFIX)) + 1
    for number in itertools.count(first):
        path = out_dir / f"{_PREFIX}{number}"
        try:
            # Fails if another run has just taken it.
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError
