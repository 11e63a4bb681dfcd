"""The minibatches of clients that train together, those of the same shape stacked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_feddua._private import tree_map
from lightning_feddua.data.client_data import ReusableBatch, stacked_batch
from lightning_feddua.data.prefetch import BatchRequest, read_batch
from lightning_feddua.engines.base import Client, GlobalState
from lightning_feddua.engines.minibatches import requests_of
from lightning_feddua.engines.stack_parts import PartBatch, parts
from lightning_feddua.host.federation import Federation


class StackedMinibatches:
    """Reads the minibatches of stacks of clients, and brings them to the device.

    Args:
        federation: the module and its clients.
    """

    def __init__(self, federation: Federation) -> None:
        self._transfer = federation.transfer
        # Clients that fit into one minibatch: who, and their samples.
        self._whole: tuple[list[int], ReusableBatch] | None = None

    def of_stack(self, chunk: list[Client], state: GlobalState, fewest: int) -> Iterator[tuple[int, list[PartBatch]]]:
        """Stacked minibatches, each with the number of the pass that the first client is in.

        Args:
            chunk: the clients, those with the most steps first.
            state: what they start from.
            fewest: how many clients it takes for a vmapped step.
        """
        work = state.work
        same = all(client.data.in_memory and len(client.data) <= work.batch_size for client in chunk)
        if same and not self._transfer.has_hooks:
            for epoch in range(work.batches(len(chunk[0].data))):
                yield epoch, self._whole_clients(chunk, state, fewest)
            return
        remaining = [(client, requests_of(client, state)) for client in chunk]
        while remaining:
            drawn = [(client, request) for client, own in remaining if (request := next(own, None)) is not None]
            remaining = remaining[: len(drawn)]
            if drawn:
                yield drawn[0][1].epoch, self._in_parts(drawn, fewest)

    def _whole_clients(self, chunk: list[Client], state: GlobalState, fewest: int) -> list[PartBatch]:
        """All samples of each client, stacked once for as long as the same clients train and no step changes them."""
        key = [client.index for client in chunk]
        if self._whole is None or self._whole[0] != key or not self._whole[1].untouched:
            drawn = [(client, next(requests_of(client, state))) for client in chunk]
            self._whole = (key, ReusableBatch(self._in_parts(drawn, fewest)))
        return self._whole[1].batch

    def _in_parts(self, drawn: list[tuple[Client, BatchRequest]], fewest: int) -> list[PartBatch]:
        """The next minibatches of the clients that still train, those of the same shape stacked."""
        found = []
        for part in parts([len(request.positions) for _, request in drawn], fewest):
            if part.alone:
                client, request = drawn[part.rows[0]]
                found.append(PartBatch(part, self._transfer(read_batch(client.data, request))))
            else:
                own = {row: drawn[row] for row in part.rows}
                # In place of a minibatch of another shape, any that has this one.
                found.append(PartBatch(part, self._stacked([own.get(row, own[part.rows[0]]) for row in part.places])))
        return found

    def _stacked(self, drawn: list[tuple[Client, BatchRequest]]) -> Any:
        together = stacked_batch([client.data for client, _ in drawn], [request.positions for _, request in drawn])
        if together is not None and not self._transfer.has_hooks:
            return self._transfer(together)
        batches = {id(request): self._transfer(read_batch(client.data, request)) for client, request in drawn}
        return tree_map(_stack, *[batches[id(request)] for _, request in drawn])


def _stack(*leaves: Any) -> Tensor:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"its batches have a `{type(leaf).__name__}` in them, which cannot be stacked over clients")
    return torch.stack(leaves)
