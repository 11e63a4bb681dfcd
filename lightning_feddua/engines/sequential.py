"""One client after another on the rank's one resident model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.aggregation.update import ClientUpdate
from lightning_feddua.clients.local_training import LocalTraining
from lightning_feddua.engines.base import Client, ClientEvents, Engine, GlobalState, register_engine
from lightning_feddua.engines.local_rounds import LocalRounds
from lightning_feddua.engines.minibatches import Minibatches
from lightning_feddua.errors import ClientError, ConfigurationError
from lightning_feddua.host.extra_gradients import ExtraGradients
from lightning_feddua.host.federation import Federation
from lightning_feddua.host.log_capture import LogCapture, compute_alone, local_metrics
from lightning_feddua.host.training_step import TRAINING_HOOKS, batch_outputs, loss_of, takes_batch_idx
from lightning_feddua.randomness import Purpose, random_state, seed_generators, set_random_state


@register_engine
class SequentialEngine(Engine):
    """Runs local steps as Trainer would: same hooks, same order, same arithmetic.

    Args:
        federation: the module and its clients, with optimizers.
        algorithm: what clients do.
        states: what they keep between rounds.
        compile: has no effect here.
    """

    name = "sequential"

    def __init__(
        self, federation: Federation, algorithm: LocalTraining, states: ClientStates, compile: bool = False
    ) -> None:
        super().__init__(federation, algorithm, states, compile)
        fabric, module = federation.fabric, federation.module
        self._module = module
        self._view = federation.view
        self._optimizers = federation.optimizers
        self._rounds = LocalRounds(federation, algorithm, states)
        self._minibatches = Minibatches(federation)
        self._gradients = ExtraGradients(federation)
        self._flat_gradient = torch.empty_like(federation.parameters.vector) if algorithm.corrects else None
        self._capture = LogCapture(fabric.device)
        self._losses: list[Tensor] = []
        self._precision = fabric.strategy.precision
        self._scaler = getattr(self._precision, "scaler", None)
        self._initial_scaler = None if self._scaler is None else self._scaler.state_dict()
        self._takes_batch_idx = takes_batch_idx(module)
        self._overridden = {name for name in TRAINING_HOOKS if is_overridden(name, module)}

    def run(
        self, clients: list[Client], state: GlobalState, events: ClientEvents
    ) -> Iterator[ClientUpdate | ClientError]:
        """Train clients one after another. An update's memory is the module's own, and is used again by the next."""
        self._view.strategy.optimizer_step = self._optimizer_step
        self._minibatches.start_round(clients, state)
        for client in clients:
            if events.start is not None:
                self.federation.restore(state.weights)
                events.start(client)
            self._stage = "local training"
            self._minibatches.start_client(client, state)
            try:
                self._load(client, state)
                metrics = self._train(client, state)
            except ConfigurationError:
                # A mistake in the setup and not of this client: all others would fail too.
                raise
            except Exception as exception:
                self._clean_up()
                yield ClientError(client.name, state.round, self._stage, exception)
                continue
            if events.end is not None:
                events.end(client)
            yield self._update(client, state, metrics)
            self.federation.parameters.drop_gradients()

    def _load(self, client: Client, state: GlobalState) -> None:
        """Bring module, optimizers, algorithm and random numbers to where a client starts from."""
        full_gradients = self._rounds.full_gradients([client], state)
        self.federation.restore(state.weights)
        self._optimizers.reset(state.lr_factor)
        self._local = self._rounds.start([client], state, full_gradients, stacked=False)
        device = self.federation.fabric.device
        seed_generators(state.seed, state.round, client.index, Purpose.LOCAL_STEPS, device)

    def _update(self, client: Client, state: GlobalState, metrics: dict[str, Tensor]) -> ClientUpdate:
        """What a client that has been trained sends; its weights in the module are spent."""
        buffers = self.federation.buffers
        delta = self.federation.parameters.take_delta(state.weights)
        floats = buffers.floats(state.weights.dtype)
        results = self._rounds.finish(delta, self._local)
        return ClientUpdate(client, delta, metrics, floats, buffers.integers(), **results._asdict())

    def _clean_up(self) -> None:
        """Leave nothing of a client that has failed to the next."""
        self._view.stop_client()
        self.federation.parameters.drop_gradients()
        self._minibatches.skip_client()
        for metric in self._module.modules():
            if isinstance(metric, Metric):
                metric.reset()

    def _train(self, client: Client, state: GlobalState) -> dict[str, Tensor]:
        """Train one client, from the weights in the module and leaving its own there; return what it logged."""
        view, capture, data, work = self._view, self._capture, client.data, state.work
        self._work = work
        capture.start()
        self._losses = []
        if self._scaler is not None:
            self._scaler.load_state_dict(self._initial_scaler)
        view.training = True
        view.start_client(work, len(data))
        view.logged_since = self._logged
        with capture.attached(self._module), local_metrics(self._module):
            self._hook("on_train_start")
            epoch, batch_idx, skipping = -1, 0, False
            for new_epoch, batch in self._read(self._minibatches.of_client(client, state)):
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

    def _read(self, batches: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Pass batches on, and note where an exception comes from."""
        while True:
            self._stage = "the reading of its data"
            drawn = next(batches, None)
            self._stage = "local training"
            if drawn is None:
                return
            yield drawn

    def _step(self, batch: Any, batch_idx: int) -> int:
        module, view = self._module, self._view
        self._batch, self._batch_idx = batch, batch_idx
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
        if "on_train_batch_end" in self._overridden:
            loss = loss_of(outputs[0], module.automatic_optimization)
            module.on_train_batch_end(batch_outputs(outputs[0], loss), batch, batch_idx)
        return 0

    def _training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.algorithm.needs_anchor_gradient:
            self._random_state = random_state(self.federation.fabric.device)
        with self._precision.forward_context():
            if self._takes_batch_idx:
                output = self._module.training_step(batch, batch_idx)
            else:
                output = self._module.training_step(batch)
        if (loss := loss_of(output, self._module.automatic_optimization)) is not None:
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
                self._correct()
            return result

        if self._scaler is None:
            result = optimizer.step(closure=closure_and_clipping, **kwargs)
        else:
            result = closure_and_clipping()
            # A closure that skipped its backward pass leaves nothing to unscale, and nothing to step with.
            if _has_gradient(optimizer):
                self._scaler.step(optimizer, **kwargs)
                self._scaler.update()
        if self._module.automatic_optimization:
            self._rounds.project(self.federation.parameters.vector, self._local)
        self._local.step += 1
        self._view.global_step += 1
        return result

    def _correct(self) -> None:
        """Let the algorithm change the gradient, as one vector; the parameters' gradients become windows on it."""
        if self._flat_gradient is None:
            return
        flat, parameters = self.federation.parameters, self.federation.parameters.tensors
        if self.algorithm.needs_anchor_gradient:
            self._local.anchor_gradient = self._anchor_gradient()
        self._flat_gradient.zero_()
        windows = flat.gather([parameter.grad for parameter in parameters], self._flat_gradient)
        self._rounds.correct(self._flat_gradient, flat.vector, self._local)
        for parameter, window in zip(parameters, windows, strict=True):
            if parameter.grad is not None:
                parameter.grad = window

    def _anchor_gradient(self) -> Tensor:
        """The gradient of the present minibatch at the global weights, with the same random numbers."""
        vector, device = self.federation.parameters.vector, self.federation.fabric.device
        weights, after = vector.clone(), random_state(device)
        vector.copy_(self._local.anchor)
        set_random_state(device, self._random_state)
        gradient = self._gradients.of_batch(self._batch, self._batch_idx)
        vector.copy_(weights)
        set_random_state(device, after)
        return gradient

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

    def _logged(self) -> dict[str, Tensor]:
        """What the module has logged in this client, reduced over its steps."""
        values = {name: value for name, (value, _) in self._capture.values().items()}
        return {**values, **{name: compute_alone(name, metric) for name, metric in self._capture.metrics.items()}}

    def _results(self) -> dict[str, Tensor]:
        results = {"loss": torch.stack(self._losses).mean()} if self._losses else {}
        # A module that logs a `loss` of its own has the last word.
        results.update(self._logged())
        # After all values: metrics of one collection may share a state.
        for metric in self._capture.metrics.values():
            metric.reset()
        return results


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
