"""Nothing that is not finite is saved, or trained from in the next round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_feddua.aggregation.finite import flawed
from lightning_feddua.errors import NotFiniteError

if TYPE_CHECKING:
    from lightning_feddua.host.federation import Federation
    from lightning_feddua.loop import FederatedLoop

_WEIGHTS = "the global weights"


def check_weights(loop: FederatedLoop) -> None:
    """One clear error if the server's step has made weights that are not finite."""
    if flawed({_WEIGHTS: loop.run.known_weights}):
        raise NotFiniteError(
            f"{_WEIGHTS.capitalize()} are not finite after the step of `{type(loop.server).__name__}` in round"
            f" {loop.run.round}, η_g = {loop.run.eta_g:.3g}. Nothing of this round is saved; try a smaller step of the"
            " server, or `max_update_norm`.",
            loop.run.round,
        )


def flawed_state(loop: FederatedLoop, federation: Federation) -> list[str]:
    """What of the state between two rounds is not finite, by name.

    Args:
        loop: the loop.
        federation: its module and clients.
    """
    transforms = {type(one).__name__: one.state_dict() for one in loop.transforms or []}
    named: dict[str, Any] = {
        f"the buffer `{name}`": value for name, value in federation.buffers.named_global_values().items()
    }
    named |= {_WEIGHTS: loop.run.weights, "the averaged iterate": loop.run.average}
    named |= {f"the state of `{name}`:": state for name, state in transforms.items()}
    named |= {"the server's state": loop.server.state_dict(), "the clients' algorithm's": loop.client.state_dict()}
    return flawed(named)


def check_state(loop: FederatedLoop, federation: Federation, excused: set[str]) -> None:
    """One clear error if a round leaves anything that is not finite.

    Args:
        loop: the loop.
        federation: its module and clients.
        excused: what was not before the first round, such as a mask with infinities.
    """
    found = [name for name in flawed_state(loop, federation) if name not in excused]
    if found:
        raise NotFiniteError(
            f"After round {loop.run.round} {found[0]} is not finite{f', and {len(found) - 1} more' * (len(found) > 1)}."
            " Nothing of this round is saved; look at what the server, validation and callbacks do.",
            loop.run.round,
        )
