"""Checkpoint files: written so that a kill at any instant leaves the previous one, and read only if intact."""

from __future__ import annotations

import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_feddua.checkpoints.archive import NotIntactError, check_archive
from lightning_feddua.checkpoints.digest import digest
from lightning_feddua.checkpoints.exchange import read_on_rank_zero
from lightning_feddua.checkpoints.trees import Flat, check_size, map_tensors
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.files import same_file, whole_file
from lightning_feddua.history import decode
from lightning_feddua.launch.run_folders import hold, versions

LAST = "last.ckpt"
# What a federated run keeps besides the entries of an ordinary Lightning checkpoint.
FEDERATED = "federated"
AVERAGED = "averaged_state_dict"
# Raised when older code could no longer make sense of what is written.
FORMAT = 2
_DIGEST = "digest"
# What content of unexpected types and sizes makes Python and torch raise.
_NOT_AS_WRITTEN = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, RecursionError)


@dataclass
class Found:
    """A checkpoint to resume from.

    Args:
        path: its file.
        checkpoint: its content.
        run_dir: the folder to continue in; None for a new one.
    """

    path: Path
    checkpoint: dict[str, Any]
    run_dir: Path | None = None

    def forget(self) -> None:
        """Give the memory of the content back, when everything has been taken over."""
        self.checkpoint = {}

    @property
    def state(self) -> dict[str, Any]:
        """What only a federated run has."""
        return self.checkpoint[FEDERATED]


class DamagedError(ConfigurationError):
    """A file that is not what was written."""


def round_name(rounds: int) -> str:
    """The file of the state after so many rounds.

    >>> round_name(100)
    'round-0100.ckpt'
    """
    return f"round-{rounds:04d}.ckpt"


def write(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a file that is there as a whole or not at all, whatever happens on the way.

    Raises:
        OSError: the disk is full or does not want to; the file that was there before is still there.
    """
    checkpoint = map_tensors(checkpoint, Flat())
    checkpoint[FEDERATED][_DIGEST] = digest(checkpoint)
    try:
        with whole_file(path, "wb") as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:
        # torch hides the error of the file's own `write` behind one of its own.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def write_all(checkpoints: Mapping[Path, dict[str, Any]]) -> None:
    """Write several files one after the other; those with the same content are one file with several names.

    Raises:
        OSError: of the first that could not be written, with its path.
    """
    written: dict[int, Path] = {}
    for path, checkpoint in checkpoints.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if id(checkpoint) in written:
                same_file(written[id(checkpoint)], path)
            else:
                write(checkpoint, path)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        written[id(checkpoint)] = path


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, loaded without running any code of it.

    Raises:
        DamagedError: the file is not as it was written.
        ConfigurationError: it is, but is no checkpoint of a federated run.
    """
    remedy = "Give the checkpoint of a federated run, or leave `ckpt_path` out to start afresh."
    checkpoint = read_checkpoint(path, remedy)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(FEDERATED), dict):
        raise ConfigurationError(f"The file `{path}` is not the checkpoint of a federated run.", remedy)
    state = checkpoint[FEDERATED]
    written = state.get("format")
    if type(written) is not int or written < 1:
        raise DamagedError(f"The checkpoint `{path}` has the format `{written!r:.20}`, which there is not.", remedy)
    if written > FORMAT:
        raise ConfigurationError(
            f"The checkpoint `{path}` was written by a newer version of this package.", "Update the package."
        )
    try:
        if written > 1:
            _check_digest(checkpoint)
        state["history"] = decode(state["history"])
    except _NOT_AS_WRITTEN as error:
        raise DamagedError(f"The checkpoint `{path}` is not as it was written: {told(error)}.", remedy) from error
    return checkpoint


def _check_digest(checkpoint: dict[str, Any]) -> None:
    expected = checkpoint[FEDERATED].pop(_DIGEST)
    if digest(checkpoint) != expected:
        raise ValueError("its digest is another")
    map_tensors(checkpoint, _check_flat)


def _check_flat(tensor: Tensor) -> None:
    if tensor.layout is torch.strided and not tensor.is_quantized:
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        if not whole or not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is a window on another")


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Say in one sentence that a checkpoint does not fit, whatever its content makes others raise in this block."""
    try:
        yield
    except ConfigurationError as error:
        if f"`{path}`" in error.problem:
            raise
        raise ConfigurationError(f"{error.problem.rstrip('.')} (checkpoint `{path}`).", error.remedy) from error
    except _NOT_AS_WRITTEN as error:
        raise ConfigurationError(
            f"The checkpoint `{path}` does not fit this run: {told(error)}.",
            "Give one that this run, or an older version of this package, has written.",
        ) from error


def told(error: Exception) -> str:
    """What an exception says, on one line, as a part of a sentence."""
    text = " ".join(str(error).split()).rstrip(".")[:200]
    return text if type(error) is ValueError and text else f"{type(error).__name__}: {text}"


def read_checkpoint(path: Path, remedy: str) -> Any:
    """The content of any checkpoint file, loaded without running any code of it.

    Args:
        path: the file.
        remedy: what to do if it cannot be read.

    Raises:
        DamagedError: the file is not as it was written.
        ConfigurationError: it cannot be read, or has more in it than tensors and plain values.
    """
    try:
        check_archive(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        check_size(checkpoint)
        return checkpoint
    except NotIntactError as error:
        raise DamagedError(f"The checkpoint `{path}` {error}.", remedy) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, *_NOT_AS_WRITTEN) as error:
        raise DamagedError(f"The checkpoint `{path}` is damaged or no checkpoint at all.", remedy) from error
    except pickle.UnpicklingError as error:
        raise ConfigurationError(
            f"The file `{path}` holds more than tensors and plain values, and loading it could run code.", remedy
        ) from error
    except OSError as error:
        raise ConfigurationError(f"The checkpoint `{path}` cannot be read: {error.strerror}.", remedy) from error


def find_checkpoint(
    fabric: Fabric, out_dir: Path, ckpt_path: str | Path | None, held: ExitStack | None = None
) -> Found | None:
    """What a run is resumed from, the same on every rank; None to start afresh. A collective.

    Args:
        fabric: for the exchange; rank 0 alone reads files.
        out_dir: where runs are kept.
        ckpt_path: a file; or ``"last"``, for the newest run that has a checkpoint.
        held: until this is closed, no other run may continue in the same folder; None to read only.
    """
    if ckpt_path is None:
        return None
    if ckpt_path != "last":
        path = Path(ckpt_path)
        return Found(path, read_on_rank_zero(fabric, read, path))

    def find() -> tuple[Path, dict[str, Any], Path | None] | None:
        found = find_last(out_dir, held)
        return None if found is None else (found.path, found.checkpoint, found.run_dir)

    found = read_on_rank_zero(fabric, find)
    if found is None:
        rank_zero_info(f"There is no checkpoint in `{out_dir}` yet: the run starts afresh.")
        return None
    return Found(*found)


def find_last(out_dir: Path, held: ExitStack | None = None) -> Found | None:
    """The newest checkpoint of the newest run that has one.

    Args:
        out_dir: where runs are kept.
        held: keeps other runs from the folder before its checkpoint is read, as long as it is open.
    """
    for run_dir in versions(out_dir):
        if not _newest_first(run_dir):
            continue
        if held is not None:
            hold(run_dir, held)
        # Listed again: another run may have gone on until its lock was free.
        return _first_intact(run_dir, _newest_first(run_dir))
    return None


def _first_intact(run_dir: Path, files: list[Path]) -> Found:
    for path in files:
        try:
            return Found(path, read(path), run_dir)
        except DamagedError as error:
            rank_zero_warn(f"{str(error).split('. ')[0]}. Looking for an older one.")
    raise ConfigurationError(
        f"Every checkpoint in `{run_dir}` is damaged.", "Move the folder away to start afresh, or give another file."
    )


def _newest_first(run_dir: Path) -> list[Path]:
    rounds = {
        path: int(match[1]) for path in run_dir.iterdir() if (match := re.match(r"round-(\d+)\.ckpt$", path.name))
    }
    last = run_dir / LAST
    return [*([last] if last.exists() else []), *sorted(rounds, key=lambda path: -rounds[path])]
