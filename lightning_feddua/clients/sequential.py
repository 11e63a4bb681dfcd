"""One client after another on the rank's one resident model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_feddua.clients.engine import Client, ClientUpdate, GlobalState, LocalWork, Notify
from lightning_feddua.data.client_data import ClientData
from lightning_feddua.errors import ClientError, ConfigurationError
from lightning_feddua.federation import Federation
from lightning_feddua.log_capture import LogCapture, compute_alone, local_metrics
from lightning_feddua.sampling import Purpose, generator, seed_generators


class SequentialEngine:
    """Runs local steps as Trainer would: same hooks, same order, same arithmetic.

    Args:
        federation: the module and its clients.
        work: how much a client does.
    """

    name = "sequential"

    def __init__(self, federation: Federation, work: LocalWork) -> None:
        fabric, module, view = federation.fabric, federation.module, federation.view
        self._federation = federation
        self._module = module
        self._view = view
        self._transfer = federation.transfer
        self._work = work
        self._capture = LogCapture(fabric.device)
        self._losses: list[Tensor] = []
        self._precision = fabric.strategy.precision
        self._scaler = getattr(self._precision, "scaler", None)
        self._initial_scaler = None if self._scaler is None else self._scaler.state_dict()
        self._takes_batch_idx = takes_batch_idx(module)
        view.strategy.optimizer_step = self._optimizer_step
        view.gradient_clip_val = work.gradient_clip_val
        self._optimizers = federation.optimizers
        self._overridden = {name for name in TRAINING_HOOKS if is_overridden(name, module)}

    def run(self, clients: list[Client], state: GlobalState, notify: Notify) -> Iterator[ClientUpdate]:
        """Train clients one after another. An update's memory is the module's own, and is used again by the next."""
        federation = self._federation
        for client in clients:
            notify("start", client)
            federation.restore(state.weights)
            seed_generators(state.seed, state.round, client.index, Purpose.LOCAL_STEPS, federation.fabric.device)
            rng = generator(state.seed, state.round, client.index, Purpose.MINIBATCHES)
            try:
                metrics = self._train(client.data, rng, state.lr_factor)
            except Exception as exception:
                raise ClientError(client.name, state.round, "local training", exception) from exception
            notify("end", client)
            delta = federation.parameters.take_delta(state.weights)
            floats = federation.buffers.floats(state.weights.dtype)
            yield ClientUpdate(client, delta, metrics, floats, federation.buffers.integers())
            federation.parameters.drop_gradients()

    def _train(self, data: ClientData, rng: np.random.Generator, lr_factor: float) -> dict[str, Tensor]:
        """Train one client, from the weights in the module and leaving its own there; return what it logged."""
        view, work, capture = self._view, self._work, self._capture
        self._optimizers.reset(lr_factor)
        capture.start()
        self._losses = []
        if self._scaler is not None:
            self._scaler.load_state_dict(self._initial_scaler)
        view.training = True
        view.start_client(work, len(data))
        with capture.attached(self._module), local_metrics(self._module):
            self._hook("on_train_start")
            epoch, batch_idx, skipping = -1, 0, False
            for new_epoch, batch in data.batches(work.batch_size, rng, steps=work.steps, epochs=work.epochs):
                if new_epoch != epoch:
                    if epoch >= 0:
                        self._end_epoch()
                    epoch, batch_idx, skipping = new_epoch, 0, False
                    view.current_epoch = epoch
                    self._hook("on_train_epoch_start")
                # As under Trainer, -1 from `on_train_batch_start` skips the rest of the pass.
                skipping = skipping or self._step(batch, batch_idx) == -1
                batch_idx += 1
            self._end_epoch()
            self._hook("on_train_end")
            view.stop_client()
            return self._results()

    def _step(self, batch: Any, batch_idx: int) -> int:
        module, view = self._module, self._view
        batch = self._transfer(batch)
        self._capture.start_batch(batch)
        if self._hook("on_train_batch_start", batch, batch_idx) == -1:
            return -1
        outputs: list[Any] = [None]

        def closure() -> Tensor | None:
            outputs[0] = self._training_step(batch, batch_idx)
            loss = loss_of(outputs[0])
            self._zero_grad(batch_idx)
            if loss is not None:
                self._backward(loss)
            return loss

        if not module.automatic_optimization:
            outputs[0] = self._training_step(batch, batch_idx)
        elif "optimizer_step" in self._overridden:
            module.optimizer_step(view.current_epoch, batch_idx, self._optimizers.wrapped[0], closure)
        else:
            self._optimizer_step(self._optimizers.optimizers[0], closure)
        if module.automatic_optimization:
            self._optimizers.step_schedulers("step", batch_idx + 1)
        self._hook("on_train_batch_end", outputs[0], batch, batch_idx)
        return 0

    def _training_step(self, batch: Any, batch_idx: int) -> Any:
        with self._precision.forward_context():
            if self._takes_batch_idx:
                output = self._module.training_step(batch, batch_idx)
            else:
                output = self._module.training_step(batch)
        if (loss := loss_of(output)) is not None:
            self._losses.append(loss.detach())
        return output

    def _zero_grad(self, batch_idx: int) -> None:
        optimizer = self._optimizers.optimizers[0]
        self._hook("on_before_zero_grad", optimizer)
        if "optimizer_zero_grad" in self._overridden:
            self._module.optimizer_zero_grad(self._view.current_epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad()

    def _backward(self, loss: Tensor) -> None:
        self._hook("on_before_backward", loss)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._module.backward(loss)
        self._hook("on_after_backward")

    def _optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step an optimizer around a closure; also what ``optimizer.step`` does in manual optimization."""

        def closure_and_clipping() -> Any:
            result = closure()
            if self._scaler is not None and _has_gradient(optimizer):
                self._scaler.unscale_(optimizer)
            self._hook("on_before_optimizer_step", optimizer)
            if self._module.automatic_optimization:
                self._clip(optimizer)
            return result

        if self._scaler is None:
            result = optimizer.step(closure=closure_and_clipping, **kwargs)
        else:
            result = closure_and_clipping()
            # A closure that skipped its backward pass leaves nothing to unscale, and nothing to step with.
            if _has_gradient(optimizer):
                self._scaler.step(optimizer, **kwargs)
                self._scaler.update()
        self._view.global_step += 1
        return result

    def _clip(self, optimizer: Optimizer) -> None:
        value = self._work.gradient_clip_val
        if "configure_gradient_clipping" in self._overridden:
            self._module.configure_gradient_clipping(optimizer, value, None)
        elif value is not None:
            self._view.strategy.clip_gradients(optimizer, value)

    def _end_epoch(self) -> None:
        self._capture.start_batch(None)
        self._hook("on_train_epoch_end")
        if self._module.automatic_optimization:
            self._optimizers.step_schedulers("epoch", self._view.current_epoch + 1)

    def _hook(self, name: str, *args: Any) -> Any:
        return getattr(self._module, name)(*args) if name in self._overridden else None

    def _results(self) -> dict[str, Tensor]:
        results = {"loss": torch.stack(self._losses).mean()} if self._losses else {}
        # A module that logs a `loss` of its own has the last word.
        results.update({name: value for name, (value, _) in self._capture.values().items()})
        # All values before any reset: metrics of one collection may share a state.
        results.update({name: compute_alone(metric) for name, metric in self._capture.metrics.items()})
        for metric in self._capture.metrics.values():
            metric.reset()
        return results


# What a module may override around its local steps.
TRAINING_HOOKS = (
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "backward",
)


def takes_batch_idx(module: LightningModule) -> bool:
    """Whether `training_step` wants the batch's number; one clear error where it wants what there is not."""
    name = type(module).__name__
    if not is_overridden("training_step", module):
        raise ConfigurationError(f"`{name}` does not define `training_step`.", "Return the loss of a batch from it.")
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise ConfigurationError(
            f"`{name}.training_step` takes a `dataloader_iter`, and a federated client has none.",
            "Write it as `training_step(self, batch, batch_idx)`.",
        )
    return len(parameters) > 1


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a `training_step` returned."""
    if output is None or isinstance(output, Tensor):
        return output
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    raise TypeError(
        f"`training_step` returned `{type(output).__name__}`. Return the loss, a dict with the key `loss`, or None."
    )
