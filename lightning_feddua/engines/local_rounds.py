"""Between an engine and the client algorithm: what the algorithm sees of a round, and where its results go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.clients.local_training import LocalRound, LocalTraining, change_in_place
from lightning_feddua.engines.base import Client, GlobalState
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.extra_gradients import ExtraGradients
from lightning_feddua.host.federation import Federation
from lightning_feddua.vectors import scalar_dtype


class AlgorithmResults(NamedTuple):
    """What the algorithm gives besides the update; of a stack of clients, a row each.

    Args:
        extra_vectors: vectors that are sent along.
        kept: vectors that a client keeps for its next round; None without any.
        scalars: numbers that are sent along.
    """

    extra_vectors: dict[str, Tensor]
    kept: Tensor | None
    scalars: dict[str, Tensor]


def take_rows(local: LocalRound, rows: slice, size: int) -> LocalRound:
    """What the algorithm knows of some of a stack's clients, in the same memory.

    Args:
        local: what it knows of all of them.
        rows: their places.
        size: how many there are in all.
    """

    def own(value: Any, vectors: bool = True) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != size:
            return value
        # What all clients share is a vector without an axis of clients.
        return value if vectors and value.shape == local.anchor.shape else value[rows]

    return replace(
        local,
        state={name: own(value) for name, value in local.state.items()},
        full_gradient=own(local.full_gradient),
        anchor_gradient=own(local.anchor_gradient),
        scratch={name: own(value) for name, value in local.scratch.items()},
        scalars={name: own(value, vectors=False) for name, value in local.scalars.items()},
    )


class LocalRounds:
    """Runs the algorithm's part of the round of one client, or of a stack of them.

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
        self._projects = type(algorithm).project is not LocalTraining.project

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

    def correct(self, gradient: Tensor, weights: Tensor, local: LocalRound) -> None:
        """Let the algorithm change gradients."""
        change_in_place(self._algorithm, "correct", gradient, weights, local)

    def project(self, weights: Tensor, local: LocalRound) -> None:
        """Let the algorithm change weights."""
        if self._projects:
            change_in_place(self._algorithm, "project", weights, local)

    def finish(self, deltas: Tensor, local: LocalRound) -> AlgorithmResults:
        """End the round of a client, or of a stack. Deltas may be changed in place."""
        extra = self._algorithm.finish(deltas, local)
        kept = [local.state[name] for name in self._states.names]
        scalars = self._scalars(deltas, local) if self._algorithm.client_scalars or local.scalars else {}
        return AlgorithmResults(extra, torch.stack(kept, dim=-2) if kept else None, scalars)

    def _scalars(self, deltas: Tensor, local: LocalRound) -> dict[str, Tensor]:
        """The numbers that the algorithm sends: exactly those that it names, one for each client."""
        algorithm, names = type(self._algorithm).__name__, self._algorithm.client_scalars
        shape, scalars = deltas.shape[:-1], {}
        for name in names:
            if name not in local.scalars:
                raise ConfigurationError(
                    f"`{algorithm}` names `{name}` in `client_scalars` but does not set `local.scalars[{name!r}]`.",
                    "Set it in `finish` at the latest, or remove the name.",
                )
            value = local.scalars[name]
            value = torch.as_tensor(value, dtype=scalar_dtype(deltas.device), device=deltas.device).detach()
            if value.numel() not in (1, shape.numel()):
                raise ConfigurationError(
                    f"`{algorithm}` sets `local.scalars[{name!r}]` to a tensor of shape {tuple(value.shape)}.",
                    "Set one number for each client: reduce over the last axis, as `delta.norm(dim=-1)` does.",
                )
            scalars[name] = value.reshape(()).expand(shape) if value.numel() == 1 else value.reshape(shape)
        for name in local.scalars.keys() - set(names):
            raise ConfigurationError(
                f"`{algorithm}` sets `local.scalars[{name!r}]`, which `client_scalars` does not name.",
                f"Add `{name}` to the tuple `client_scalars` of the class.",
            )
        return scalars
