"""What the loop asks of a server rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate
    from lightning_feddua.host.parameters import ParameterLayout
    from lightning_feddua.loop import FederatedLoop


class Server(FederatedCallback, ABC):
    """Moves the global weights once per round. A rule overrides :meth:`step`.

    A rule that remembers something from round to round also overrides :meth:`reset`, :meth:`state_dict` and
    :meth:`load_state_dict`. Its public attributes are its settings: a run resumes from a checkpoint only if they are
    the same, so anything that changes during a run belongs in private attributes.

    Example:
        Every weight moves by the same amount:

        >>> import torch
        >>> from lightning_feddua import RoundUpdate
        >>> class FedSign(Server):
        ...     def __init__(self, eta_g=0.001):
        ...         self.eta_g = eta_g
        ...
        ...     def step(self, weights, update):
        ...         weights.add_(update.mean_delta.sign(), alpha=self.eta_g)
        ...         return self.eta_g
        >>> weights = torch.zeros(2)
        >>> FedSign(0.5).step(weights, RoundUpdate(torch.tensor([3.0, -2.0]), torch.tensor([13.0])))
        0.5
        >>> weights
        tensor([ 0.5000, -0.5000])
    """

    #: Whether the step is set from the data. The average of the last two iterates is then evaluated.
    adaptive: bool = False
    #: η where the rule is exactly ``w += η Δ̄``; None otherwise. Some client algorithms need such a rule.
    mean_step: float | None = None
    #: What the rule adapts to: each coordinate's own past updates, and how much clients differ.
    coordinate_adaptive: bool = False
    client_adaptive: bool = False

    _layout: ParameterLayout | None = None

    @abstractmethod
    def step(self, weights: Tensor, update: RoundUpdate) -> float:
        """Move the weights, in place, by one round's update.

        Every rank calls this with the same input and must come to the same result, so a rule draws nothing at random.

        Args:
            weights: the global weights ``w_t``, flat.
            update: the round's mean update and squared norms, which must not be changed.

        Returns:
            The global learning rate η, which is logged as ``eta_g``.
        """

    def reset(self) -> None:
        """Forget all rounds."""

    def set_up(self, layout: ParameterLayout, compile: bool = False) -> None:
        """Start a fit.

        Args:
            layout: where each parameter is in the flat vectors.
            compile: whether the user asked for compiled code.
        """
        self._layout = layout

    @property
    def layout(self) -> ParameterLayout:
        """Where each parameter is in the flat vectors; ``layout.views(weights)`` gives them by name, as tensors."""
        if self._layout is None:
            raise ConfigurationError(
                f"`{type(self).__name__}` asks for the layout of the parameters, which is unknown outside of `fit`.",
                "Call `set_up(layout)` first.",
            )
        return self._layout

    @property
    def averages(self) -> bool:
        """Whether the new weights are the mean of the clients' weights."""
        return self.mean_step == 1.0

    def on_aggregate_end(self, loop: FederatedLoop, update: RoundUpdate) -> None:
        """Apply the round's update to the loop's global weights."""
        own = update.sole_weights.of(update) if update.sole_weights is not None and self.averages else None
        eta: Any = self.step(loop.run.known_weights, update)
        if own is not None:
            # The mean of one client's weights is these weights.
            loop.run.known_weights.copy_(own)
        if isinstance(eta, Tensor | np.ndarray) and eta.ndim == 0:
            eta = eta.item()
        if isinstance(eta, bool) or not isinstance(eta, Real):
            raise ConfigurationError(
                f"`{type(self).__name__}.step` returned `{eta!r:.100}`, which is not a number.",
                "Return the global learning rate η of the round, which is logged as `eta_g`.",
            )
        loop.eta_g = float(eta)
