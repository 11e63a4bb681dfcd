"""What ranks exchange, and who is missing when an exchange fails."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_feddua._private import default_store, process_group_timeout
from lightning_feddua.errors import ConfigurationError, RankError

# Under this prefix each rank writes into the process group's store how many exchanges it has come to.
_PREFIX = "lightning_feddua/arrivals/"
# Seconds that the store has to answer: its own process may be the one that hangs.
_STORE_SECONDS = 5.0
# What a device is asked for to pass on a tensor of any size.
_PIECE_ELEMENTS = 1 << 24
_arrivals = 0
# The name that torch has given it in 2.13, and the one before.
_gather_into = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)


def all_reduce_sum(fabric: Fabric, tensor: Tensor) -> None:
    """Sum a tensor over ranks, in place. Fabric's own would add a barrier to each."""
    if fabric.world_size > 1:
        with named_absence(fabric):
            _wait(fabric, torch.distributed.all_reduce(tensor, async_op=True))


def all_to_all(fabric: Fabric, arrived: Tensor, rows: Tensor, counts: Sequence[int]) -> None:
    """Send each of several ranks some rows.

    Args:
        fabric: for the collective.
        arrived: where the rows go that come to this rank, in rank order.
        rows: what this rank sends, as many to each rank, in rank order.
        counts: how many rows each rank sends to each.
    """
    ranks = len(counts)
    with named_absence(fabric):
        sent = [len(rows) // ranks] * ranks
        _wait(fabric, torch.distributed.all_to_all_single(arrived, rows, list(counts), sent, async_op=True))


def all_gather(fabric: Fabric, gathered: Tensor, vector: Tensor) -> None:
    """Collect the vectors of several ranks, which have one length, in rank order."""
    with named_absence(fabric):
        _wait(fabric, _gather_into(gathered, vector, async_op=True))


def gather_objects(fabric: Fabric, value: Any) -> list[Any]:
    """The value of each rank, in rank order, on every rank."""
    if fabric.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * fabric.world_size
    with named_absence(fabric):
        torch.distributed.all_gather_object(gathered, value)
    return gathered


def broadcast_object(fabric: Fabric, value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if fabric.world_size == 1:
        return value
    with named_absence(fabric):
        return fabric.broadcast(value)


def broadcast_tensor(fabric: Fabric, tensor: Tensor) -> None:
    """Give every rank rank 0's values, in place; a tensor on the CPU goes by way of the device, piece by piece."""
    if fabric.world_size == 1:
        return
    for piece in tensor.view(-1).split(_PIECE_ELEMENTS):
        moved = piece.to(fabric.device)
        with named_absence(fabric):
            _wait(fabric, torch.distributed.broadcast(moved, 0, async_op=True))
        if moved is not piece:
            piece.copy_(moved)


@contextmanager
def named_absence(fabric: Fabric) -> Iterator[None]:
    """Around an exchange that every rank takes part in: one that fails names the ranks that have not come to it.

    Raises:
        RankError: a rank has ended, or has not come within the process group's timeout.
    """
    global _arrivals
    _arrivals += 1
    own = _arrivals
    store = default_store()
    store.set(f"{_PREFIX}{fabric.global_rank}", str(own))
    try:
        yield
    except RuntimeError as error:
        problem = " ".join(str(error).split()).rstrip(".")
        raise RankError(f"{_absence(fabric, store, own)} (rank {fabric.global_rank} was told: {problem}).") from error


def uses_store_of_torchrun() -> bool:
    """Whether the process group's store is not with rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wait(fabric: Fabric, work: Any) -> None:
    # With its timeout given, NCCL, too, waits here and raises, instead of ending the process from a thread.
    work.wait(process_group_timeout(fabric.strategy) or torch.distributed.default_pg_timeout)


def _absence(fabric: Fabric, store: Any, own: int) -> str:
    others = [rank for rank in range(fabric.world_size) if rank != fabric.global_rank]
    known = _within(_STORE_SECONDS, lambda: {rank: _arrived(store, rank) for rank in others})
    if known is None:
        keeper = "torchrun" if uses_store_of_torchrun() else "Rank 0"
        return f"{keeper}, which keeps the ranks together, does not answer"
    missing = [rank for rank, count in known.items() if count < own]
    if not missing:
        return "An exchange between ranks failed although all have come to it"
    names = f"Rank {missing[0]} has" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))} have"
    return f"{names} ended, or not come to an exchange within the loop's `timeout`"


def _arrived(store: Any, rank: int) -> int:
    key = f"{_PREFIX}{rank}"
    return int(store.get(key)) if store.check([key]) else 0


def _within(seconds: float, function: Callable[[], Any]) -> Any:
    """What a function returns, or None if that takes too long or fails."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception:
            results.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def on_local_rank_zero(fabric: Fabric, function: Callable[[], Any]) -> None:
    """Run a function on one rank of each node; its error reaches all of them. A collective.

    Raises:
        ConfigurationError: one of them has raised one; every rank raises the same.
        RankError: one of them has raised something else, which it raises itself.
    """
    error: Exception | None = None
    if fabric.local_rank == 0:
        try:
            function()
        except Exception as exception:
            error = exception
    told = None if error is None else _as_told(fabric.global_rank, error)
    found: Exception | None = next((one for one in gather_objects(fabric, told) if one is not None), None)
    if found is not None:
        raise error or found


def on_rank_zero(fabric: Fabric, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function that rank 0 alone runs, on every rank; a collective.

    Raises:
        ConfigurationError: rank 0 has raised one; every rank raises the same.
        RankError: rank 0 has raised something else, which it raises itself.
    """
    result: Any = None
    error: Exception | None = None
    if fabric.is_global_zero:
        try:
            result = function(*arguments)
        except Exception as exception:
            error = exception
    told = None if error is None else _as_told(0, error)
    result, told = broadcast_object(fabric, (result, told))
    if error is not None or told is not None:
        raise error or told
    return result


def _as_told(rank: int, error: Exception) -> Exception:
    """An exception as other ranks raise it: itself where it says what to do, or else one that names the rank."""
    if isinstance(error, ConfigurationError):
        return error
    trace = "".join(traceback.format_exception(error))
    return RankError(f"Rank {rank} has failed with {type(error).__name__}: {error}\n{trace}")
