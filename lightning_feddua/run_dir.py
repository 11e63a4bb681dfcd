"""A folder for each run."""

import itertools
from pathlib import Path

from lightning.fabric import Fabric

from lightning_feddua.errors import ConfigurationError


def new_run_dir(fabric: Fabric, out_dir: Path) -> Path:
    """Make the first free ``out_dir/version_N``; every rank gets its path, or the same error."""
    path, error = "", ""
    if fabric.is_global_zero:
        try:
            path = str(_make_next_version(out_dir))
        except OSError as exception:
            error = exception.strerror or str(exception)
    path, error = fabric.broadcast((path, error))
    if error:
        raise ConfigurationError(
            f"The folder `{out_dir}` cannot be written: {error}.", "Give a writable folder as `out_dir`."
        )
    return Path(path)


def _make_next_version(out_dir: Path) -> Path:
    out_dir.mkdir(parents=True, exist_ok=True)
    versions = (p.name.removeprefix("version_") for p in out_dir.glob("version_*"))
    start = max((int(v) + 1 for v in versions if v.isdecimal()), default=0)
    for number in itertools.count(start):
        path = out_dir / f"version_{number}"
        try:
            # Fails if another run has just taken it.
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError
