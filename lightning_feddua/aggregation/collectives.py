"""What ranks exchange. Every collective of the package is here, so that none waits for a rank without naming it."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torchmetrics import Metric

from lightning_feddua.aggregation.presence import exchange, patience, wait
from lightning_feddua.errors import ConfigurationError, RankError

# What a device is asked for to pass on a tensor of any size.
_PIECE_ELEMENTS = 1 << 24
# What a Fabric's strategy exchanges for the callbacks of a user.
_OF_STRATEGY = ("barrier", "broadcast", "all_reduce", "all_gather")
# The name that torch has given it in 2.13, and the one before.
_GATHER_INTO = "all_gather_single" if hasattr(torch.distributed, "all_gather_single") else "all_gather_into_tensor"


def all_reduce_sum(fabric: Fabric, tensor: Tensor) -> None:
    """Sum a tensor over ranks, in place. Fabric's own would add a barrier to each."""
    if fabric.world_size > 1:
        with exchange(fabric):
            wait(fabric, torch.distributed.all_reduce(tensor, async_op=True))


def barrier(fabric: Fabric) -> None:
    """Wait for all ranks."""
    all_reduce_sum(fabric, torch.zeros(1, device=fabric.device))


def all_to_all(fabric: Fabric, arrived: Tensor, rows: Tensor, counts: Sequence[int]) -> None:
    """Send each of several ranks some rows.

    Args:
        fabric: for the collective.
        arrived: where the rows go that come to this rank, in rank order.
        rows: what this rank sends, as many to each rank, in rank order.
        counts: how many rows each rank sends to each.
    """
    ranks = len(counts)
    with exchange(fabric):
        sent = [len(rows) // ranks] * ranks
        wait(fabric, torch.distributed.all_to_all_single(arrived, rows, list(counts), sent, async_op=True))


def all_gather(fabric: Fabric, gathered: Tensor, vector: Tensor) -> None:
    """Collect the vectors of several ranks, which have one length, in rank order."""
    with exchange(fabric):
        wait(fabric, getattr(torch.distributed, _GATHER_INTO)(gathered, vector, async_op=True))


def broadcast_tensors(fabric: Fabric, tensors: Iterable[Tensor]) -> None:
    """Give every rank the values that tensors have on rank 0."""
    if fabric.world_size > 1:
        with exchange(fabric):
            for tensor in tensors:
                wait(fabric, torch.distributed.broadcast(tensor, src=0, async_op=True))


def gather_objects(fabric: Fabric, value: Any) -> list[Any]:
    """The value of each rank, in rank order, on every rank."""
    ranks = fabric.world_size
    if ranks == 1:
        return [value]
    own = _pickled(fabric, value)
    sizes = torch.empty(ranks, dtype=torch.int64, device=fabric.device)
    all_gather(fabric, sizes, torch.tensor([len(own)], device=fabric.device))
    longest = int(sizes.max())
    gathered = own.new_empty(ranks * longest)
    all_gather(fabric, gathered, torch.nn.functional.pad(own, (0, longest - len(own))))
    return [_unpickled(row[:size]) for row, size in zip(gathered.view(ranks, -1), sizes.tolist(), strict=True)]


def broadcast_object(fabric: Fabric, value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if fabric.world_size == 1:
        return value
    own = _pickled(fabric, value if fabric.global_rank == 0 else None)
    size = torch.tensor([len(own)], device=fabric.device)
    broadcast_tensors(fabric, [size])
    content = own if fabric.global_rank == 0 else own.new_empty(int(size))
    broadcast_tensors(fabric, [content])
    return value if fabric.global_rank == 0 else _unpickled(content)


def pass_on(fabric: Fabric, sent: Iterable[tuple[Tensor, int]], received: Iterable[tuple[Tensor, int]]) -> None:
    """Send tensors to single ranks, and receive others. A collective, also for ranks that do neither.

    Args:
        fabric: for the collective.
        sent: each with the rank that it goes to.
        received: each with the rank that it comes from; written to.
    """
    with _all_here(fabric):
        works = [torch.distributed.isend(tensor, rank) for tensor, rank in sent]
        works += [torch.distributed.irecv(tensor, rank) for tensor, rank in received]
        for work in works:
            assert work is not None
            work.wait(patience(fabric))


def compute_together(fabric: Fabric, metric: Metric) -> Any:
    """The value of a metric that all ranks have updated."""
    with _all_here(fabric):
        return metric.compute()


def guard(fabric: Fabric) -> None:
    """Name absent ranks in the collectives of Fabric itself, too, which callbacks may use."""
    for name in _OF_STRATEGY:
        setattr(fabric.strategy, name, _guarded(fabric, getattr(fabric.strategy, name)))


def _guarded(fabric: Fabric, method: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(method, "names_absent_ranks", False):
        # A strategy that several loops use.
        return method

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if fabric.world_size == 1 or torch.distributed.get_world_size() == 1:
            return method(*args, **kwargs)
        with _all_here(fabric):
            return method(*args, **kwargs)

    call.names_absent_ranks = True  # type: ignore[attr-defined]
    return call


def broadcast_tensor(fabric: Fabric, tensor: Tensor) -> None:
    """Give every rank rank 0's values, in place; a tensor on the CPU goes by way of the device, piece by piece."""
    if fabric.world_size == 1:
        return
    for piece in tensor.view(-1).split(_PIECE_ELEMENTS):
        moved = piece.to(fabric.device)
        broadcast_tensors(fabric, [moved])
        if moved is not piece:
            piece.copy_(moved)


@contextmanager
def _all_here(fabric: Fabric) -> Iterator[None]:
    """Around a collective that can only be waited for to its end: it begins when all ranks have come."""
    barrier(fabric)
    with exchange(fabric):
        yield


def _pickled(fabric: Fabric, value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(fabric.device)


def _unpickled(content: Tensor) -> Any:
    return pickle.loads(content.cpu().numpy().data)


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
