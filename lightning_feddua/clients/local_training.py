"""The base of all client algorithms: plain local training, with a method for each thing that may be changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_feddua.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate
    from lightning_feddua.servers import Server


@dataclass
class LocalRound:
    """What an algorithm knows while a client trains, or a stack of n clients together.

    A client's vectors have d elements, and those of a stack have shape (n, d). Vectors that all clients share have d
    elements, so the same elementwise code works for both.

    Args:
        anchor: the global weights ``w_t`` that the round started from; shared.
        lr: the local learning rate of this round.
        step: how many local steps are done.
        state: the vectors that each client keeps between rounds, by name; changed in place.
        full_gradient: ``∇F_i(w_t)`` over all of a client's data, if the algorithm asks for it.
        anchor_gradient: the gradient at ``w_t`` of the current minibatch, if the algorithm asks for it.
        scratch: vectors that an algorithm keeps for the round. In a stack, what has a first axis of clients loses the
            rows of those that have made their last step.
        scalars: the numbers named in ``client_scalars``, set in ``finish``. In a stack, a number holds for all clients,
            and a tensor has one element for each.
    """

    anchor: Tensor
    lr: float
    step: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    full_gradient: Tensor | None = None
    anchor_gradient: Tensor | None = None
    scratch: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Tensor | float] = field(default_factory=dict)


class LocalTraining:
    """Plain local training: steps of the module's own optimizer, and the base of all client algorithms.

    An algorithm may change gradients before a step and weights after it, keep vectors for each client, send vectors and
    numbers along with the update, and do something after the server's step. Methods that it does not override cost
    nothing. Both engines run the same code; in the vectorized one, vectors have a first axis of clients. The state of
    the server side between rounds goes into ``vectors`` and ``numbers``.

    Example:
        Local steps that pull towards the global weights, with a strength that fades with the steps:

        >>> class Fading(LocalTraining):
        ...     def correct(self, gradient, weights, local):
        ...         gradient.add_(weights - local.anchor, alpha=1 / (1 + local.step))
    """

    # Vectors that each client keeps between rounds (zero at first), vectors that are averaged along with the updates,
    # and numbers that each client sends to the server.
    client_state: tuple[str, ...] = ()
    extra_vectors: tuple[str, ...] = ()
    client_scalars: tuple[str, ...] = ()
    # What local steps adapt to: each coordinate's own gradients, and how this client differs from the others.
    coordinate_adaptive: bool = False
    client_adaptive: ClassVar[bool] = False
    # What the algorithm needs; checked before a run starts.
    needs_full_gradient: bool = False
    needs_anchor_gradient: ClassVar[bool] = False
    needs_mean_gradient: ClassVar[bool] = False
    needs_constant_lr: ClassVar[bool] = False
    needs_all_clients: ClassVar[bool] = False
    needs_local_steps: ClassVar[bool] = False
    supports_vectorized: ClassVar[bool] = True

    def __init__(self) -> None:
        self.vectors: dict[str, Tensor] = {}
        self.numbers: dict[str, float] = {}

    @property
    def touches_steps(self) -> bool:
        """Whether local steps differ from the module's own."""
        return any(self._overrides(name) for name in ("start", "correct", "project", "finish"))

    @property
    def extra_client_cost(self) -> bool:
        """Whether a client keeps, sends or computes more than in plain local training."""
        return bool(self.client_state) or self.vectors_sent > 1 or self.gradient_evaluations != "τ"

    @property
    def vectors_sent(self) -> int:
        """How many vectors of the model's size a client sends in a round, including its update."""
        return 1 + len(self.extra_vectors) + self.needs_mean_gradient

    @property
    def gradient_evaluations(self) -> str:
        """What a client computes in a round of τ steps: gradients of minibatches, and of all its data."""
        full = self.needs_full_gradient or self.needs_mean_gradient
        return ("2τ" if self.needs_anchor_gradient else "τ") + " + full" * full

    @property
    def draws_steps(self) -> bool:
        """Whether the number of local steps is drawn at random in each round."""
        return self._overrides("local_steps")

    @property
    def corrects(self) -> bool:
        """Whether it changes gradients."""
        return self._overrides("correct")

    @property
    def parts(self) -> list[LocalTraining]:
        """The algorithms that this one is made of: only itself, unless it combines others."""
        return [self]

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(LocalTraining, name)

    def check_server(self, server: Server) -> None:
        """Raise one clear error for a server rule that the algorithm cannot work with.

        ``server.mean_step`` and ``server.averages`` tell whether the rule is a step along the mean update.
        """

    def set_up(self, weights: Tensor, population: int, local_steps: int | None) -> None:
        """Start a run: create the server side's vectors.

        Args:
            weights: the initial global weights.
            population: the number of clients.
            local_steps: the loop's setting.
        """

    def local_steps(self, rng: np.random.Generator, local_steps: int | None) -> int | None:
        """How many local steps each client does in a round.

        Args:
            rng: the round's own generator.
            local_steps: the loop's setting; None if it counts epochs.
        """
        return local_steps

    def begin_round(self, lr: float, mean_gradient: Tensor | None) -> None:
        """Before the local steps of a round, on every rank.

        Args:
            lr: the local learning rate of the round.
            mean_gradient: the mean of the cohort's full gradients, if the algorithm asks for it.
        """

    def start(self, local: LocalRound) -> None:
        """Before the first local step."""

    def correct(self, gradient: Tensor, weights: Tensor, local: LocalRound) -> None:
        """Change the (clipped) gradient, in place, before the optimizer's step.

        Args:
            gradient: the gradient of the minibatch at the client's weights.
            weights: the client's weights.
            local: everything else about the round.
        """

    def project(self, weights: Tensor, local: LocalRound) -> None:
        """Change the weights, in place, after the optimizer's step."""

    def finish(self, delta: Tensor, local: LocalRound) -> dict[str, Tensor]:
        """After the last local step: update ``local.state``, set ``local.scalars``, and return the extra vectors.

        Args:
            delta: the client's update, which may be changed in place.
            local: everything else about the round.
        """
        return {}

    def aggregate(self, weights: Tensor, update: RoundUpdate, eta_g: float) -> None:
        """After the server's step: update the server side.

        Args:
            weights: the new global weights, which may be changed in place.
            update: the round's means, including those of the extra vectors, and the clients' numbers.
            eta_g: the server's step in this round.
        """

    def state_dict(self) -> dict[str, Any]:
        """The server side's state, as tensors and numbers."""
        return {"algorithm": type(self).__name__, "vectors": dict(self.vectors), "numbers": dict(self.numbers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another run of the same algorithm."""
        self._check_state(state)
        for name, vector in state["vectors"].items():
            known = self.vectors.get(name)
            self.vectors[name] = vector.clone() if known is None else known.copy_(vector)
        self.numbers = dict(state["numbers"])

    def _check_state(self, state: dict[str, Any]) -> None:
        if state["algorithm"] != type(self).__name__:
            raise ConfigurationError(
                f"The saved client state belongs to `{state['algorithm']}`, and this is `{type(self).__name__}`.",
                "Resume with the same client algorithm, or start afresh.",
            )


def broadcast(vector: Tensor, like: Tensor) -> Tensor:
    """A copy of what all clients share for a client, or for each client of a stack."""
    return vector.expand_as(like).clone(memory_format=torch.contiguous_format)


def change_in_place(algorithm: LocalTraining, method: str, changed: Tensor, *arguments: Any) -> None:
    """Call ``correct`` or ``project``; one clear error if it returns what it should have changed in place."""
    returned = getattr(algorithm, method)(changed, *arguments)
    if returned is not None and returned is not changed:
        raise ConfigurationError(
            f"`{type(algorithm).__name__}.{method}` returned a `{type(returned).__name__}`, which would be lost.",
            "It must change its first argument in place, as `gradient.add_(...)` does, and return None.",
        )
