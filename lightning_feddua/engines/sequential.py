"""One client after another on the rank's one resident model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.aggregation.update import ClientUpdate
from lightning_feddua.clients.local_training import LocalTraining
from lightning_feddua.engines.base import Client, ClientEvents, Engine, GlobalState, register_engine
from lightning_feddua.engines.local_rounds import LocalRounds
from lightning_feddua.engines.minibatches import Minibatches
from lightning_feddua.engines.optimizer_steps import OptimizerSteps
from lightning_feddua.engines.time_limit import tried_twice
from lightning_feddua.errors import ClientError, ConfigurationError
from lightning_feddua.host.federation import Federation
from lightning_feddua.host.log_capture import LogCapture, compute_alone, local_metrics
from lightning_feddua.host.training_step import TRAINING_HOOKS, batch_outputs, loss_of, takes_batch_idx
from lightning_feddua.randomness import Purpose, seed_generators


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
        self._capture = LogCapture(fabric.device, by_steps=True)
        self._losses: list[Tensor] = []
        self._precision = fabric.strategy.precision
        self._takes_batch_idx = takes_batch_idx(module)
        self._overridden = {name for name in TRAINING_HOOKS if federation.callbacks.defines(name)}
        self._steps = OptimizerSteps(federation, algorithm, self._rounds, self._overridden, self._hook)

    def run(
        self, clients: list[Client], state: GlobalState, events: ClientEvents
    ) -> Iterator[ClientUpdate | ClientError]:
        """Train clients one after another. An update's memory is the module's own, and is used again by the next."""
        self._view.strategy.optimizer_step = self._steps.step
        self._minibatches.start_round(clients, state)
        for place, client in enumerate(clients):
            self.federation.hidden_state.restore()
            if events.start is not None:
                self.federation.restore(state.weights)
                events.start(client)
            try:
                metrics = self._try(client, state, clients[place:])
            except ConfigurationError:
                # A mistake in the setup and not of this client: all others would fail too.
                raise
            except Exception as exception:
                self._clean_up(client, exception, clients[place + 1 :], state)
                yield ClientError(client.name, state.round, self._stage, exception)
                continue
            if events.end is not None:
                events.end(client)
            yield self._update(client, state, metrics)
            self.federation.drop_gradients()

    def close(self) -> None:
        """End worker processes that read for it."""
        self._minibatches.close()

    def _try(self, client: Client, state: GlobalState, following: list[Client]) -> dict[str, Tensor]:
        """Train a client, if need be twice, and return what it logged."""

        def train() -> dict[str, Tensor]:
            self._stage = "local training"
            self._minibatches.start_client(client, state)
            self._load(client, state)
            return self._train(client, state)

        def recover(error: Exception) -> None:
            self._clean_up(client, error, following, state)
            self.federation.hidden_state.restore()

        return tried_twice(train, state.work.timeout, client.name, recover)

    def _load(self, client: Client, state: GlobalState) -> None:
        """Bring module, optimizers, algorithm and random numbers to where a client starts from."""
        full_gradients = self._rounds.full_gradients([client], state)
        self.federation.restore(state.weights)
        self._optimizers = self.federation.use_optimizers(len(client.data))
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

    def _clean_up(self, client: Client, error: Exception, following: list[Client], state: GlobalState) -> None:
        """Leave nothing of a client that has failed to those that follow."""
        self._view.stop_client()
        self.federation.drop_gradients()
        self._minibatches.recover(client, error, following, state)

    def _train(self, client: Client, state: GlobalState) -> dict[str, Tensor]:
        """Train one client, from the weights in the module and leaving its own there; return what it logged."""
        view, capture, data, work = self._view, self._capture, client.data, state.work
        self._work = work
        capture.start()
        self._losses = []
        self._steps.start_client(self._optimizers, self._local, work)
        view.in_client = True
        view.start_client(work, len(data))
        view.client_data, view.logged_since = data, capture.logged_by_steps
        with capture.attached(self._module), local_metrics(self._module):
            self._hook("on_train_start")
            epoch, batch_idx, skipping = -1, 0, False
            self._accumulated, self._pass_ended = 0, False
            counts_passes = work.accumulate > 1 or bool(self._optimizers.schedulers)
            for index, (new_epoch, batch) in enumerate(self._read(self._minibatches.of_client(client, state))):
                if new_epoch != epoch:
                    if epoch >= 0:
                        self._end_epoch()
                    epoch, batch_idx, skipping = new_epoch, 0, False
                    view.current_epoch = epoch
                    capture.start_pass()
                    self._hook("on_train_epoch_start")
                # As under Trainer, -1 from `on_train_batch_start` skips the rest of the pass.
                ends_pass = counts_passes and self._minibatches.ends_pass(client, work, index)
                skipping = skipping or self._step(batch, batch_idx, ends_pass) == -1
                batch_idx += 1
            self._end_epoch()
            view.current_epoch = epoch + 1
            self._hook("on_train_end")
            view.log_options |= capture.options
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

    def _step(self, batch: Any, batch_idx: int, ends_pass: bool) -> int:
        module, view, accumulate = self._module, self._view, self._work.accumulate
        view.batch_idx = batch_idx
        self._capture.start_batch(batch)
        if self._hook("on_train_batch_start", batch, batch_idx) == -1:
            # As under Trainer, for which this was the pass's last minibatch.
            self._accumulated = 0
            self._step_schedulers(batch_idx, stepped=True, ends_pass=True)
            return -1
        outputs: list[Any] = [None]

        def closure() -> Tensor | None:
            outputs[0] = self._training_step(batch, batch_idx)
            loss = loss_of(outputs[0])
            if self._accumulated == 0:
                self._steps.zero_grad(batch_idx)
            if loss is not None:
                self._steps.backward(loss if accumulate == 1 else loss / accumulate)
            return loss

        steps = self._accumulated + 1 == accumulate or (ends_pass and self._work.steps is None)
        if not module.automatic_optimization:
            outputs[0] = self._training_step(batch, batch_idx)
        elif not steps:
            closure()
        elif "optimizer_step" in self._overridden:
            module.optimizer_step(view.current_epoch, batch_idx, self._optimizers.wrapped[0], closure)
        else:
            self._steps.step(self._optimizers.optimizers[0], closure)
        self._accumulated = 0 if steps else self._accumulated + 1
        self._step_schedulers(batch_idx, steps, ends_pass)
        if "on_train_batch_end" in self._overridden:
            loss = loss_of(outputs[0], module.automatic_optimization)
            loss = loss if loss is None or accumulate == 1 else loss / accumulate
            self._hook("on_train_batch_end", batch_outputs(outputs[0], loss), batch, batch_idx)
        if steps and self._optimizers.plateaus:
            self._optimizers.step_plateaus("step", batch_idx + 1, self._watched)
        return 0

    def _step_schedulers(self, batch_idx: int, stepped: bool, ends_pass: bool) -> None:
        """After a minibatch, step the schedulers that do not watch a metric, where and when Trainer does."""
        self._pass_ended = ends_pass
        if stepped and self._optimizers.schedulers:
            self._optimizers.step_schedulers("step", batch_idx + 1)
        if ends_pass:
            self._optimizers.step_schedulers("epoch", self._view.current_epoch + 1)

    def _training_step(self, batch: Any, batch_idx: int) -> Any:
        self._steps.correct.start_batch(batch, batch_idx)
        with self._precision.forward_context():
            if self._takes_batch_idx:
                output = self._module.training_step(batch, batch_idx)
            else:
                output = self._module.training_step(batch)
        if (loss := loss_of(output, self._module.automatic_optimization)) is not None:
            self._losses.append(loss.detach())
        return output

    def _end_epoch(self) -> None:
        self._capture.start_batch(None)
        self._hook("on_train_epoch_end")
        if self._pass_ended and self._optimizers.plateaus:
            self._optimizers.step_plateaus("epoch", self._view.current_epoch + 1, self._watched)

    def _hook(self, name: str, *args: Any) -> Any:
        return self.federation.callbacks.hook(name, *args) if name in self._overridden else None

    def _logged(self) -> dict[str, Tensor]:
        """What the module has logged in this client, reduced over its steps."""
        values = {name: value for name, (value, _) in self._capture.values().items()}
        return {**values, **{name: compute_alone(name, metric) for name, metric in self._capture.metrics.items()}}

    def _watched(self) -> dict[str, Tensor]:
        """What schedulers see of it: as under Trainer, values of the last step or pass."""
        return self._capture.logged_by_steps("callback")

    def _results(self) -> dict[str, Tensor]:
        results = {"loss": torch.stack(self._losses).mean()} if self._losses else {}
        # A module that logs a `loss` of its own has the last word.
        results.update(self._logged())
        # After all values: metrics of one collection may share a state.
        for metric in self._capture.metrics.values():
            metric.reset()
        return results
