"""One optimizer step of a client as Trainer makes it: zero, backward, unscale, clip, correct, step, project."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.engines.base import LocalWork
from lightning_feddua.engines.gradient_correction import GradientCorrection
from lightning_feddua.engines.local_rounds import LocalRounds
from lightning_feddua.host.federation import Federation
from lightning_feddua.host.optimizers import LocalOptimizers


class OptimizerSteps:
    """Steps the optimizers of the client in training, with the module's hooks and the algorithm around them.

    Args:
        federation: the module and its clients.
        algorithm: what clients do.
        rounds: the algorithm's part of the steps.
        overridden: the hooks that somebody defines.
        hook: calls one of these.
    """

    def __init__(
        self,
        federation: Federation,
        algorithm: LocalTraining,
        rounds: LocalRounds,
        overridden: set[str],
        hook: Callable[..., Any],
    ) -> None:
        self._federation = federation
        self._module, self._view = federation.module, federation.view
        self._rounds = rounds
        self._overridden, self._hook = overridden, hook
        self._scaler = getattr(federation.fabric.strategy.precision, "scaler", None)
        self._initial_scaler = None if self._scaler is None else self._scaler.state_dict()
        self.correct = GradientCorrection(federation, algorithm, rounds)

    def start_client(self, optimizers: LocalOptimizers, local: LocalRound, work: LocalWork) -> None:
        """Make ready for a client's first step.

        Args:
            optimizers: the client's.
            local: what the algorithm knows.
            work: how much the client does.
        """
        self._optimizers, self._local, self._work = optimizers, local, work
        if self._scaler is not None:
            self._scaler.load_state_dict(self._initial_scaler)

    def zero_grad(self, batch_idx: int) -> None:
        """Clear the gradients before a backward pass."""
        optimizer = self._optimizers.optimizers[0]
        self._hook("on_before_zero_grad", optimizer)
        if "optimizer_zero_grad" in self._overridden:
            self._module.optimizer_zero_grad(self._view.current_epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those that are there."""
        self._hook("on_before_backward", loss)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._module.backward(loss)
        self._hook("on_after_backward")

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step an optimizer around a closure; also what ``optimizer.step`` does in manual optimization."""
        decayed = self._optimizers.decayed(optimizer)

        def closure_and_clipping() -> Any:
            result = closure()
            if self._scaler is not None and _has_gradient(optimizer):
                self._scaler.unscale_(optimizer)
            self._hook("on_before_optimizer_step", optimizer)
            if self._module.automatic_optimization:
                self._clip(optimizer)
                self.correct(self._local)
            if decayed is not None:
                decayed.renew()
            return result

        if self._scaler is None:
            result = optimizer.step(closure=closure_and_clipping, **kwargs)
        else:
            result = closure_and_clipping()
            # A closure that skipped its backward pass leaves nothing to unscale, and nothing to step with.
            if _has_gradient(optimizer):
                self._scaler.step(optimizer, **kwargs)
                self._scaler.update()
        if decayed is not None:
            decayed.undo()
        if self._module.automatic_optimization:
            self._rounds.project(self._federation.parameters.vector, self._local)
        self._local.step += 1
        self._view.global_step += 1
        return result

    def _clip(self, optimizer: Optimizer) -> None:
        clip = self._work.clip
        if "configure_gradient_clipping" in self._overridden:
            value, algorithm = self._view.gradient_clip_val, self._view.gradient_clip_algorithm
            self._module.configure_gradient_clipping(optimizer, value, algorithm)
        elif clip is not None:
            self._view.strategy.clip_gradients(optimizer, clip.value, clip.algorithm)


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
