"""The minibatches of one client after another, read in this process or ahead of time by worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_feddua.data.client_data import ReusableBatch, minibatches
from lightning_feddua.data.prefetch import BatchRequest, Prefetcher, read_batch
from lightning_feddua.data.streams import ClientStream
from lightning_feddua.engines.base import Client, GlobalState, LocalWork
from lightning_feddua.engines.time_limit import is_passing, time_limit
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.federation import Federation
from lightning_feddua.randomness import Purpose, generator


def requests_of(client: Client, state: GlobalState) -> Iterator[BatchRequest]:
    """The minibatches that a client trains on in a round, in order."""
    if isinstance(client.data, ClientStream):
        raise ConfigurationError(
            f"Client `{client.name}` is a DataLoader or a stream, which only the sequential engine reads.",
            'Use `engine="sequential"`.',
        )
    rng = generator(state.seed, state.round, client.index, Purpose.MINIBATCHES)
    work = state.work
    size, epochs = len(client.data), work.epochs
    steps = None if work.steps is None else work.batches(size)
    drawn = minibatches(size, work.batch_size, rng, steps=steps, epochs=epochs, length=work.pass_length(size))
    for step, (epoch, positions) in enumerate(drawn):
        yield BatchRequest(state.seed, state.round, client.index, step, epoch, positions)


class Minibatches:
    """Reads the minibatches of a rank's clients, and brings them to the device.

    Args:
        federation: the module and its clients.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._transfer = federation.transfer
        self._prefetcher: Prefetcher | None = None
        # Minibatches of the round that worker processes prepare, and how many of them the present client still has.
        self._prefetched: Iterator[tuple[BatchRequest, Any]] | None = None
        self._ahead = 0
        # Whether the minibatch that was read last from a stream is the last of its pass.
        self._stream_ends = False

    def start_round(self, clients: list[Client], state: GlobalState) -> None:
        """Let worker processes, if there are any, begin with the minibatches of these clients."""
        self._prefetched = None
        workers = self._federation.datamodule.num_workers
        streams = any(isinstance(client.data, ClientStream) for client in clients)
        if workers == 0 or streams or all(client.data.in_memory for client in clients):
            return
        requests = [r for client in clients for r in requests_of(client, state)]
        try:
            self._prefetched = self._start_workers(workers).start(requests)
        except RuntimeError as error:
            if not is_passing(error):
                raise
            # One has died since the last round.
            self.close(at_once=True)
            self._prefetched = self._start_workers(workers).start(requests)

    def _start_workers(self, count: int) -> Prefetcher:
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._federation.client_data, count)
            self._federation.at_exit(self._prefetcher.close)
        return self._prefetcher

    def close(self, at_once: bool = False) -> None:
        """End the worker processes; at once, whatever they are doing."""
        if self._prefetcher is not None:
            self._prefetcher.close(at_once)
        self._prefetcher = self._prefetched = None

    def ends_pass(self, client: Client, work: LocalWork, index: int) -> bool:
        """Whether the minibatch that was read last, at a place in the client's, is the last of a pass."""
        return self._stream_ends if isinstance(client.data, ClientStream) else work.ends_pass(len(client.data), index)

    def start_client(self, client: Client, state: GlobalState) -> None:
        """Make ready for the next client, in the order of the round."""
        self._ahead = 0 if self._prefetched is None else state.work.batches(len(client.data))

    def recover(self, client: Client, error: Exception, following: list[Client], state: GlobalState) -> None:
        """After a client that has failed, get ready for those that follow.

        Args:
            client: the client.
            error: what it failed with.
            following: those that have yet to train; itself, if it is tried once more.
            state: what they start from.
        """
        if self._prefetched is None:
            return
        try:
            if is_passing(error):
                raise error
            with time_limit(state.work.timeout, client.name):
                self._skip_rest()
        except Exception:
            self.close(at_once=True)
            self.start_round(following, state)

    def _skip_rest(self) -> None:
        """Leave out what the present client has not read."""
        while self._prefetched is not None and self._ahead:
            self._ahead -= 1
            try:
                next(self._prefetched)
            except Exception as error:
                # Those that cannot be read either.
                if is_passing(error):
                    raise

    def of_client(self, client: Client, state: GlobalState) -> Iterator[tuple[int, Any]]:
        """The present client's minibatches, each with the number of the pass over the data that it belongs to."""
        data, work = client.data, state.work
        if isinstance(data, ClientStream):
            yield from self._of_stream(client, data, state)
            return
        if self._prefetched is not None:
            while self._ahead:
                self._ahead -= 1
                request, batch = next(self._prefetched)
                yield request.epoch, self._transfer(batch)
            return
        if len(data) > work.batch_size or not data.in_memory or self._transfer.has_hooks:
            for request in requests_of(client, state):
                yield request.epoch, self._transfer(read_batch(data, request))
            return
        # The same samples in each step: they are copied once, unless a step writes to them.
        whole: ReusableBatch | None = None
        for epoch in range(work.batches(len(data))):
            if whole is None or not whole.untouched:
                whole = ReusableBatch(self._transfer(data.batch(np.arange(len(data)))))
            yield epoch, list(whole.batch)

    def _of_stream(self, client: Client, data: ClientStream, state: GlobalState) -> Iterator[tuple[int, Any]]:
        """Minibatches as they come. One is read ahead, as under Trainer: nobody else knows where a pass ends."""
        work = state.work
        if data.samples < 0 and isinstance(work.limit, float) and work.limit < 1:
            raise ConfigurationError(
                f"Client `{client.name}` is a stream of unknown length, of which `limit_train_batches={work.limit}` is"
                " not known.",
                "Give a number of minibatches.",
            )
        steps = None if work.steps is None else work.batches(len(data))
        length = None if work.limit is None else work.pass_length(len(data))
        batches = data.batches(state.seed, state.round, client.index, steps, work.epochs, length)
        present = next(batches, None)
        while present is not None:
            following = next(batches, None)
            self._stream_ends = self._federation.view.stream_ends = following is None or following[0] != present[0]
            yield present[0], self._transfer(present[1])
            present = following
