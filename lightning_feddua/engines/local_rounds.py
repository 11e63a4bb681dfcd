"""Between an engine and the client algorithm: what the algorithm sees of a round, and where its results go."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.engines.base import Client, GlobalState
from lightning_feddua.host.extra_gradients import ExtraGradients
from lightning_feddua.host.federation import Federation


class LocalRounds:
    """Starts and finishes the algorithm's part of the round of one client, or of a stack of them.

    Args:
        federation: the module and its clients.
        algorithm: what clients do.
        states: what they keep.
    """

    def __init__(self, federation: Federation, algorithm: LocalTraining, states: ClientStates) -> None:
        self._federation = federation
        self._algorithm = algorithm
        self._states = states
        self._gradients = ExtraGradients(federation)

    def full_gradients(self, clients: list[Client], state: GlobalState) -> list[Tensor] | None:
        """``∇F_i(w_t)`` of each client, where the algorithm asks for it. Uses the module's weights."""
        if not self._algorithm.needs_full_gradient:
            return None
        return [self._gradients.of_client(client, state) for client in clients]

    def start(
        self, clients: list[Client], state: GlobalState, full_gradients: list[Tensor] | None, stacked: bool
    ) -> LocalRound:
        """What the algorithm sees of these clients; with a first axis if they are stacked."""
        local = LocalRound(state.weights, self._federation.optimizers.lr)

        def shaped(vectors: list[Tensor]) -> Tensor:
            return torch.stack(vectors) if stacked else vectors[0]

        if self._states.names:
            kept = shaped([self._states.get(client.index) for client in clients])
            local.state = dict(zip(self._states.names, kept.unbind(-2), strict=True))
        if full_gradients is not None:
            local.full_gradient = shaped(full_gradients)
        self._algorithm.start(local)
        return local

    def finish(self, deltas: Tensor, local: LocalRound) -> tuple[dict[str, Tensor], Tensor | None]:
        """What clients send along, and what they keep; of a stack, a row each. Deltas may be changed in place."""
        extra = self._algorithm.finish(deltas, local)
        if not self._states.names:
            return extra, None
        return extra, torch.stack([local.state[name] for name in self._states.names], dim=-2)
