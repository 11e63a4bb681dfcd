"""Worker processes that prepare minibatches while other clients train."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_feddua._private import end_workers, forget_workers
from lightning_feddua.data.client_data import ClientData
from lightning_feddua.randomness import Purpose, preserved_random_state, seed_generators

# How long a worker may take to be gone.
_WORKER_SECONDS = 0.5


class WorkerError(RuntimeError):
    """A worker process has died, for which no client is to blame."""


class BatchRequest(NamedTuple):
    """One minibatch of one client.

    Args:
        seed: the run's seed.
        round: the round.
        client: the index of the client in the data module.
        step: the number of the minibatch within the client's round.
        epoch: the number of the pass over the data.
        positions: the positions of its samples.
    """

    seed: int
    round: int
    client: int
    step: int
    epoch: int
    positions: np.ndarray


def read_batch(data: ClientData, request: BatchRequest) -> Any:
    """One minibatch. What its samples draw at random follows from the request, in whatever process they are read.

    The random state of the local steps is left alone.

    Args:
        data: the client's samples.
        request: which minibatch.
    """
    if data.in_memory:
        return data.batch(request.positions)
    cpu = torch.device("cpu")
    with preserved_random_state(cpu):
        seed_generators(request.seed, request.round, request.client << 20 | request.step, Purpose.DATA, cpu)
        return data.batch(request.positions)


class Prefetcher:
    """Worker processes that live for a whole run and prepare the minibatches of each round in order.

    Args:
        client_data: returns the samples of the client at an index in the data module.
        num_workers: the number of worker processes.
    """

    def __init__(self, client_data: Callable[[int], ClientData], num_workers: int) -> None:
        self._requests = _Requests()
        self._readers: set[BaseProcess] = set()
        self._loader: DataLoader[Any] = DataLoader(
            _Batches(client_data),
            batch_size=None,
            sampler=self._requests,
            num_workers=num_workers,
            collate_fn=_identity,
            persistent_workers=True,
        )

    def start(self, requests: Sequence[BatchRequest]) -> Iterator[tuple[BatchRequest, Any]]:
        """The minibatches of a round, one by one. Some are prepared in advance."""
        self._requests.requests = requests
        before = set(multiprocessing.active_children())
        batches = iter(self._loader)
        forget_workers(self._loader)
        self._readers |= set(multiprocessing.active_children()) - before
        return zip(requests, _Watched(batches, self._readers), strict=True)

    def close(self, at_once: bool = False) -> None:
        """End the worker processes.

        The garbage collector would do this at any moment and wait five seconds for each worker, because it closes the
        queues to them first.

        Args:
            at_once: whatever they are doing.
        """
        end_workers(self._loader, at_once)


class _Watched:
    """Passes batches on. Where a worker has died, whatever shows it is that error."""

    def __init__(self, batches: Iterator[Any], workers: Collection[BaseProcess]) -> None:
        self._batches, self._readers = batches, workers

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            if isinstance(error, OSError | EOFError):
                # Its connections may be closed before it is gone.
                wait([worker.sentinel for worker in self._readers], _WORKER_SECONDS)
            if all(worker.is_alive() for worker in self._readers):
                raise
            raise WorkerError(f"a worker process that reads data has died ({type(error).__name__})") from error


class _Requests(Sampler[BatchRequest]):
    def __init__(self) -> None:
        self.requests: Sequence[BatchRequest] = []

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)


class _Batches(Dataset[Any]):
    def __init__(self, client_data: Callable[[int], ClientData]) -> None:
        self._client_data = client_data

    def __getitem__(self, request: BatchRequest) -> Any:
        return read_batch(self._client_data(request.client), request)


def _identity(batch: Any) -> Any:
    return batch
