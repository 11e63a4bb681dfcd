"""The federated loop: sample, train locally, reduce, step the server, validate, log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning import LightningModule
from torch.utils.data import Dataset

from lightning_feddua.aggregation.backend import Training
from lightning_feddua.aggregation.collectives import barrier
from lightning_feddua.aggregation.faults import check_history
from lightning_feddua.aggregation.simulation import Simulation
from lightning_feddua.aggregation.update import RoundUpdate
from lightning_feddua.aggregation.workspace import Workspace
from lightning_feddua.argument_names import check_names
from lightning_feddua.callbacks.defaults import all_callbacks, saves
from lightning_feddua.callbacks.hooks import Hooks
from lightning_feddua.callbacks.rescue import rescue
from lightning_feddua.callbacks.stopping import (
    agree_on_signals,
    has_all_rounds,
    heed_signals_of_save,
    leave_if_told,
    tell_why,
    unsaved,
)
from lightning_feddua.certificates.finite_state import check_weights
from lightning_feddua.checkpoints import Found, find_checkpoint, finish_loggers, restore, start_loggers
from lightning_feddua.checkpoints.identity import agreed_digest, identity
from lightning_feddua.checkpoints.schema import engine_of
from lightning_feddua.clients import LocalTraining
from lightning_feddua.compatibility import check_algorithm, check_unequal
from lightning_feddua.data.module import FederatedDataModule, as_datamodule
from lightning_feddua.errors import ConfigurationError, UnsavedError
from lightning_feddua.host.federation import Federation
from lightning_feddua.host.sanity_check import sanity_check
from lightning_feddua.launch.exits import ending
from lightning_feddua.launch.fabric import make_fabric, precision_name
from lightning_feddua.launch.launcher import Launcher
from lightning_feddua.launch.preemption import Preemption
from lightning_feddua.launch.run_folders import open_run_dir, temporary_run_dir
from lightning_feddua.lightning_names import is_module
from lightning_feddua.loop_evaluation import LoopEvaluation
from lightning_feddua.metric_names import LAST_ITERATE
from lightning_feddua.run import Run
from lightning_feddua.sampling import check_cohort
from lightning_feddua.servers import FedDuAdagrad
from lightning_feddua.settings import RunSettings
from lightning_feddua.signatures import documents, takes


@documents(RunSettings)
class FederatedLoop(LoopEvaluation):
    """Trains a LightningModule over many clients, on one device or many.

    Each round a cohort of clients is dealt to the ranks; every rank trains its clients with the module's own optimizer,
    an all-reduce collects the mean update and the clients' squared norms, and the server, a callback, moves the global
    weights. Every random draw depends on (seed, round, client) alone, so the number of ranks does not change a run.

    Arguments are keyword-only. Each can be read as an attribute of the same name; those that are not used up by the
    constructor can be assigned before another fit.

    Example:
        >>> from lightning_feddua.data import SyntheticRegression
        >>> from lightning_feddua.models import LinearRegression
        >>> loop = FederatedLoop(max_rounds=3, local_steps=5, precision="64-true", out_dir=getfixture("tmp_path"),
        ...                      enable_progress_bar=False)
        >>> loop.fit(LinearRegression(dim=10), SyntheticRegression(num_clients=4, dim=10))
        >>> [row["round"] for row in loop.history]
        [0, 1, 2]
    """

    @takes(RunSettings)
    def __init__(self, **arguments: Any) -> None:
        check_names(arguments, (one.name for one in fields(RunSettings)))
        self.settings = settings = RunSettings(**arguments)
        self.server = settings.server or FedDuAdagrad()
        self.client = settings.client or LocalTraining()
        self.client.check_server(self.server)
        self.backend = settings.backend or Simulation()
        self.callbacks = self._given_callbacks = all_callbacks(settings, self.server)
        self.fabric = make_fabric(settings)
        self.run = Run(self.out_dir)
        self.identity: dict[str, Any] = {}
        self.identity_digest = ""
        self.client_metrics = {}
        self._federation: Federation | None = None
        # Where to end a fit that repeats only a part of a run.
        self._until: int | None = None
        self._elsewhere: dict[str, Any] = {}
        self._hooks = Hooks([])
        self._preemption = Preemption(enabled=False)
        self._launcher = Launcher(self.fabric, self._results, self._take_results)

    def fit(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule | Mapping[str, Dataset[Any]],
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Run all rounds. The model holds the final global weights afterwards.

        A run that saves itself heeds SIGTERM: it finishes the round, saves, and ends the process with code 143. So it
        does on Ctrl-C, and raises KeyboardInterrupt; a second Ctrl-C ends it at once. Before the first round there is
        nothing to save, and either ends all ranks as soon as they exchange something.

        Args:
            model: any LightningModule.
            datamodule: the clients; a mapping of datasets by client name will do.
            ckpt_path: a checkpoint to resume from, as if the run had never stopped, in a new folder with the whole
                history; or ``"last"``, to resume the newest run in ``out_dir`` that has a checkpoint, in its own
                folder, and to start afresh where there is none.
        """
        if (error := self._launch(self._fit, model, as_datamodule(datamodule), ckpt_path)) is not None:
            raise error

    def _fit(self, *arguments: Any) -> UnsavedError | None:
        fabric = self.fabric
        self._preemption = Preemption(saves(self.callbacks), fabric.is_global_zero, partial(ending, fabric))
        with self._preemption:
            error = self._fit_saving(*arguments)
            # What came after the last round's end is heeded by all ranks, too.
            agree_on_signals(self)
            leave_if_told(self)
        return error

    def _fit_saving(
        self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str | Path | None
    ) -> UnsavedError | None:
        self.run = run = Run(self.out_dir)
        with ExitStack() as stack:
            found = find_checkpoint(self.fabric, self.out_dir, ckpt_path, None if self.fast_dev_run else stack)
            federation = Federation(self.fabric, model, datamodule, self.settings, "fit", self._take_callbacks)
            self._federation = stack.enter_context(federation)
            self._set_up(federation, found)
            if has_all_rounds(self, found):
                return None
            held = None if found is None else found.run_dir
            folder = (
                temporary_run_dir(self.fabric) if self.fast_dev_run else open_run_dir(self.fabric, self.out_dir, held)
            )
            run.folder = stack.enter_context(folder)
            federation.view.received = lambda: self._preemption.requested
            start_loggers(self.fabric, federation, run)
            federation.view.run = run
            try:
                self._call("on_fit_start")
                federation.callbacks.hook("on_fit_start")
                if found is None and self.validate_every:
                    sanity_check(federation, self.num_sanity_val_steps, run.known_weights)
                # Nobody begins a round who has yet to hear that another was told to end.
                barrier(self.fabric)
                self._preemption.wait_for_rounds(saves(self.callbacks))
                for round in range(len(run.history), self._until or self.max_rounds):
                    self._run_round(round, federation)
                    heed_signals_of_save(self)
                    if run.stop_reason is not None:
                        leave_if_told(self)
                        break
                federation.callbacks.hook("on_fit_end")
                self._call("on_fit_end")
                finish_loggers(self.fabric, "success")
                tell_why(self)
                return unsaved(self)
            except BaseException as exception:
                federation.restore(run.known_weights)
                rescue(self, exception)
                run.recover(self.server.adaptive)
                federation.callbacks.call("on_exception", exception)
                self._call("on_exception", exception=exception)
                finish_loggers(self.fabric, "failed")
                raise

    def _set_up(self, federation: Federation, found: Found | None) -> None:
        """Check everything, make what a run needs, and bring it to the state of a checkpoint, if any."""
        run, population = self.run, len(federation.client_ids)
        size = self.sampler.size(population)
        federation.configure_optimizers()
        check_algorithm(self.client, federation, size or 0, self.local_steps, self.engine)
        transforms = self.settings.all_transforms()
        for transform in transforms:
            transform.reset()
        if self.on_client_error == "skip" or transforms:
            check_unequal(self.client)
        run.weights = federation.global_weights()
        run.workspace = Workspace(run.weights)
        self.client.set_up(run.weights, population, self.local_steps)
        self.server.reset()
        self.server.set_up(federation.parameters.layout(federation.module), self.compile is True)
        # What is meant by a fraction of the clients, or by a precision's other name.
        cohort = None if self.settings.sampler is not None else size
        settings = replace(self.settings, clients_per_round=cohort, precision=precision_name(self.fabric))
        self.identity = identity(settings, self.server, self.client, federation, self.callbacks)
        self.identity_digest = agreed_digest(self.identity, federation)
        self.backend.set_up(Training(federation, self.client, settings, transforms, run.weights, run.workspace))
        if self.server.adaptive:
            run.start_average()
        if found is not None:
            restore(self, federation, found)
        self.backend.start(self._sample(0, population), None if found is None else engine_of(found.state))
        if found is not None:
            found.forget()
        federation.check_validation(self.validate_every > 0)

    def _run_round(self, round: int, federation: Federation) -> None:
        start = time.perf_counter()
        run = self.run
        run.round = round
        federation.view.start_round(round)
        cohort = self._sample(round, len(federation.client_ids))
        self._call("on_round_start", round=round, cohort=cohort)

        run.drop_average()
        events = self._hooks.client_events(self, round)
        with federation.training(run.known_weights):
            update = self.backend.run(round, cohort, events, self._wants_to_stop)
        run.is_whole = False
        self._step(update, federation)

        row = run.row_of(update, len(cohort) - update.clients if self.on_client_error == "skip" else None)
        federation.view.take_round(row)
        if self.validate_every and ((round + 1) % self.validate_every == 0 or round + 1 == self.max_rounds):
            row.update(self._validate(federation))
        if update.clients:
            federation.schedules.end_round(round, self.validate_every, update.metrics, row)
        row["seconds"] = time.perf_counter() - start
        run.history.append(row)
        federation.view.take_round(row)
        self.fabric.log_dict({name: value for name, value in row.items() if name != "round"}, step=round)
        # What all ranks know by now; on anything later they agree after the user's callbacks.
        if self.backend.stop or (self.fabric.world_size == 1 and self._wants_to_stop()):
            run.stop_reason = "asked for"
        self._call("on_round_end", round=round)
        run.is_whole = True
        check_history(run.history)

    def _step(self, update: RoundUpdate, federation: Federation) -> None:
        """``w_t`` becomes ``w_{t+1}``, in the module too; without a client nothing moves."""
        run, weights = self.run, self.run.known_weights
        if self.server.adaptive:
            run.start_average()
        if update.clients == 0:
            run.eta_g = 0.0
            return
        # Callbacks before the server may still change the update.
        with run.update_changes.watched(update, self._hooks.owners("on_aggregate_end", until=self.server)):
            self._hooks.call("on_aggregate_end", until=self.server, loop=self, update=update)
        # The server's step: w_{t+1} = w_t + η G⁻¹ v, for FedDuA.
        self._hooks.call("on_aggregate_end", only=self.server, loop=self, update=update)
        self.client.aggregate(weights, update, run.eta_g)
        check_weights(self)
        if run.average is not None:
            run.average.lerp_(weights, 0.5)
        federation.buffers.update(update.float_buffers, update.float_changed, update.integer_buffers)
        federation.restore(weights)
        self._hooks.call("on_aggregate_end", after=self.server, loop=self, update=update)

    def _validate(self, federation: Federation) -> dict[str, float]:
        """Metrics of the global model: of the average of the last two iterates where the step is adaptive."""
        run, last = self.run, dict[str, float]()
        if run.average is not None:
            # Only what is validated counts for what the module keeps, such as its best accuracy.
            with federation.callbacks.muted(), federation.hidden_state.undone():
                last = federation.evaluate("validation")
            federation.restore(run.average)
        self._call("on_validation_start")
        metrics = run.columns.validation(federation.evaluate("validation"))
        metrics |= {f"{LAST_ITERATE}/{name}": value for name, value in run.columns.validation(last).items()}
        self._call("on_validation_end", metrics=metrics)
        federation.buffers.take()
        federation.restore(self.run.known_weights)
        return metrics

    def _sample(self, round: int, population: int) -> list[int]:
        return check_cohort(self.sampler, self.sampler.sample(self.seed, round, population), population)

    def _call(self, hook: str, **arguments: Any) -> None:
        self._hooks.call(hook, loop=self, **arguments)

    def _launch(self, function: Callable[..., Any], model: LightningModule, *arguments: Any) -> Any:
        if not is_module(model):
            raise ConfigurationError(f"The model is `{model!r:.100}`.", "Give an instance of `LightningModule`.")
        return self._launcher.call(function, model, *arguments)
