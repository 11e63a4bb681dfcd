"""The federated loop: sample, train locally, reduce, step the server, validate, log."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import LightningModule
from lightning.fabric.loggers import Logger
from lightning.fabric.strategies.launchers import _MultiProcessingLauncher
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import Dataset

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.aggregation.simulation import CohortTraining, TrainingSettings
from lightning_feddua.aggregation.update import RoundUpdate
from lightning_feddua.callbacks import CSVLog, FederatedCallback, ProgressBar, RunInfo, TensorBoard
from lightning_feddua.callbacks.hooks import Hooks
from lightning_feddua.checkpoints import Found, find_checkpoint, identity, replay, restore
from lightning_feddua.clients.local_training import LocalTraining
from lightning_feddua.compatibility import check_algorithm, check_unequal
from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.engines.base import Client, LocalWork
from lightning_feddua.engines.trial import known_engine
from lightning_feddua.host.evaluation import Stage
from lightning_feddua.host.federation import Federation
from lightning_feddua.launch.fabric import exit_code, launch, leave_process_group, make_fabric
from lightning_feddua.launch.preemption import Preemption
from lightning_feddua.launch.processes import run_in_processes
from lightning_feddua.launch.run_folders import open_run_dir
from lightning_feddua.sampling import sample_cohort
from lightning_feddua.servers import FedDuAdagrad, Server
from lightning_feddua.settings import (
    as_datamodule,
    check_choice,
    check_instance,
    check_positive,
    check_settings,
    cohort_size,
    with_checkpoint,
)

ENGINES = ("auto", "sequential", "vectorized")
CLIENT_WEIGHTS = ("uniform", "samples")
CLIENT_STATES = ("memory", "disk")
CLIENT_ERRORS = ("raise", "skip")
# Prefix of the metrics of w_{t+1}, where the plain names are those of the averaged iterate.
LAST_ITERATE = "last_iterate"


class FederatedLoop:
    """Trains a LightningModule over many clients, on one device or many.

    Each round a cohort of clients is dealt to the ranks; every rank trains its clients with the module's own optimizer,
    an all-reduce collects the mean update and the clients' squared norms, and the server, a callback, moves the global
    weights. Every random draw depends on (seed, round, client) alone, so the number of ranks does not change a run.

    Args:
        server: the server rule; :class:`FedDuAdagrad` by default.
        client: the clients' algorithm; plain local training by default.
        max_rounds: the number of rounds.
        clients_per_round: how many clients take part in a round; a fraction of them if a float; all if None.
        local_steps: the number of local steps of each client. Exactly one of this and ``local_epochs`` is given.
        local_epochs: the number of passes of each client over its data.
        client_weights: ``"uniform"``, or ``"samples"`` to weigh clients by their number of samples, in the mean update
            and in FedDuA's norms alike.
        gradient_clip_val: the largest global norm of a local gradient; None for no clipping.
        local_lr_decay: multiplies the module's learning rates in each round after the first.
        engine: how a rank runs its clients: ``"sequential"``, one after another, bit for bit as Trainer would;
            ``"vectorized"``, many in one vmapped step; ``"auto"``, whichever a few trial steps show to be faster.
        compile: whether the vectorized engine compiles the local steps of a stack of clients into one function, and
            a server of many parameters its step. That takes a minute or so at the first start, less at others, and is
            checked against the eager steps.
        channels_last: whether convolutions and images get this memory format, with which many are faster.
        lanes: into how many sums, added in a fixed order, the clients' updates go, so that with the sequential engine
            any number of ranks up to it gives the same bits. More lanes than twice the ranks take more memory and
            traffic, where there are more than two ranks. None adds in whatever order is fastest, in less memory.
        client_states: where the vectors are that an algorithm keeps for each client: ``"memory"`` or ``"disk"``.
        on_client_error: what becomes of a client that raises an exception, or whose update is not finite: ``"raise"``
            ends the run, on all ranks, with a :class:`ClientError`; ``"skip"`` warns, and leaves it out of the round.
            After three rounds in a row in which all clients failed the run ends in any case.
        max_update_norm: the largest norm of a client's update, to which longer ones are clipped, in the mean and in
            FedDuA's norms alike; None for no clipping.
        validate_every: validate after every so many rounds and after the last; 0 for never.
        checkpoint_every: save the run after every so many rounds and after the last; None for never. A
            :class:`~lightning_feddua.callbacks.Checkpoint` among the callbacks can also keep the best rounds.
        out_dir: where runs are kept; each gets a folder ``version_N`` of its own.
        seed: of cohorts, minibatches and everything random in local steps.
        accelerator: as in Fabric.
        strategy: as in Fabric; ``"ddp"`` and its kin.
        devices: as in Fabric; under torchrun, the processes it started.
        num_nodes: as in Fabric.
        precision: as in Fabric.
        timeout: seconds that ranks wait for each other in an exchange, the longest difference in their local training
            included. Then an error names those that are missing.
        callbacks: a callback or a list of them.
        loggers: Fabric or Lightning loggers; ``metrics.csv`` is written in any case.
        tensorboard: whether to log metrics, η_g, the norms of clients' updates and the recipe for TensorBoard;
            ``tensorboard --logdir runs`` shows them while the run goes on.
        enable_progress_bar: whether to print a header and the progress.

    Example:
        >>> from lightning_feddua.data import SyntheticRegression
        >>> from lightning_feddua.models import LinearRegression
        >>> loop = FederatedLoop(max_rounds=3, local_steps=5, precision="64-true", out_dir=getfixture("tmp_path"),
        ...                      enable_progress_bar=False)
        >>> loop.fit(LinearRegression(dim=10), SyntheticRegression(num_clients=4, dim=10))
        >>> [row["round"] for row in loop.history]
        [0, 1, 2]
    """

    def __init__(
        self,
        *,
        server: Server | None = None,
        client: LocalTraining | None = None,
        max_rounds: int = 500,
        clients_per_round: int | float | None = None,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        client_weights: Literal["uniform", "samples"] = "uniform",
        gradient_clip_val: float | None = None,
        local_lr_decay: float = 1.0,
        engine: Literal["auto", "sequential", "vectorized"] = "auto",
        compile: bool = False,
        channels_last: bool = False,
        lanes: int | None = 8,
        client_states: Literal["memory", "disk"] = "memory",
        on_client_error: Literal["raise", "skip"] = "raise",
        max_update_norm: float | None = None,
        validate_every: int = 1,
        checkpoint_every: int | None = None,
        out_dir: str | Path = "runs",
        seed: int = 0,
        accelerator: str = "auto",
        strategy: str = "auto",
        devices: int | list[int] | str = "auto",
        num_nodes: int = 1,
        precision: str = "32-true",
        timeout: float = 1800.0,
        callbacks: FederatedCallback | Sequence[FederatedCallback] | None = None,
        loggers: Logger | list[Logger] | None = None,
        tensorboard: bool = False,
        enable_progress_bar: bool = True,
    ) -> None:
        check_settings(max_rounds, clients_per_round, local_steps, local_epochs, validate_every, seed)
        check_positive("gradient_clip_val", gradient_clip_val)
        check_positive("local_lr_decay", local_lr_decay)
        check_positive("lanes", lanes)
        check_positive("max_update_norm", max_update_norm)
        check_positive("timeout", timeout)
        check_instance("server", server, Server)
        check_instance("client", client, LocalTraining)
        check_choice("engine", engine, ENGINES)
        check_choice("client_weights", client_weights, CLIENT_WEIGHTS)
        check_choice("client_states", client_states, CLIENT_STATES)
        check_choice("on_client_error", on_client_error, CLIENT_ERRORS)
        self.server: Server = server if server is not None else FedDuAdagrad()
        self.client = client if client is not None else LocalTraining()
        self.client.check_server(self.server)
        self.max_rounds = max_rounds
        self.clients_per_round = clients_per_round
        self.local_steps, self.local_epochs = local_steps, local_epochs
        self.client_weights = client_weights
        self.gradient_clip_val = gradient_clip_val
        self.local_lr_decay = local_lr_decay
        self.engine = engine
        self.compile = compile
        self.channels_last = channels_last
        self.lanes = lanes
        self.client_states = client_states
        self.on_client_error = on_client_error
        self.max_update_norm = max_update_norm
        self.validate_every = validate_every
        self.out_dir = Path(out_dir)
        self.seed = seed
        if isinstance(callbacks, FederatedCallback):
            callbacks = [callbacks]
        own, checkpoints = with_checkpoint(callbacks or [], checkpoint_every)
        # The server steps last in `on_aggregate_end`; what reports on a round, or saves it, comes last of all.
        self.callbacks: list[FederatedCallback] = [*own, self.server, CSVLog(), RunInfo(), *checkpoints]
        self._saves = bool(checkpoints)
        if tensorboard:
            self.callbacks.append(TensorBoard())
        if enable_progress_bar:
            self.callbacks.append(ProgressBar())
        self.fabric = make_fabric(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            timeout=timeout,
            callbacks=self.callbacks,
            loggers=loggers,
        )
        self._launched = False
        self.run_dir = self.out_dir
        self.history: list[dict[str, Any]] = []
        self.current_round = 0
        self.eta_g = 0.0
        self.stopping = False

    def fit(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule | Mapping[str, Dataset[Any]],
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Run all rounds. The model holds the final global weights afterwards.

        A run that saves itself heeds SIGTERM: it finishes the round, saves, and ends the process with code 143.

        Args:
            model: any LightningModule.
            datamodule: the clients; a mapping of datasets by client name will do.
            ckpt_path: a checkpoint to go on from, as if the run had never stopped, in a new folder with the whole
                history; or ``"last"``, to go on with the newest run in ``out_dir`` that has a checkpoint, in its own
                folder, and to start afresh where there is none.
        """
        self._launch(self._fit, model, as_datamodule(datamodule), ckpt_path)

    def validate(
        self, model: LightningModule, datamodule: FederatedDataModule, per_client: bool = False
    ) -> dict[str, float]:
        """Metrics of the model's ``validation_step`` on the data module's validation data.

        Args:
            model: the model.
            datamodule: the data.
            per_client: validate on each client's own data instead, and return the mean, the standard deviation and the
                mean of the worst tenth over clients, as ``name/mean``, ``name/std`` and ``name/worst_decile``.
        """
        stage: Stage | Literal["clients"] = "clients" if per_client else "validation"
        return self._launch(self._evaluate, model, as_datamodule(datamodule), stage)

    def test(self, model: LightningModule, datamodule: FederatedDataModule) -> dict[str, float]:
        """Metrics of the model's ``test_step`` on the data module's test data."""
        return self._launch(self._evaluate, model, as_datamodule(datamodule), "test")

    def _fit(
        self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str | Path | None = None
    ) -> None:
        self._hooks = Hooks(self.callbacks)
        found = find_checkpoint(self.fabric, self.out_dir, ckpt_path)
        with (
            Federation(self.fabric, model, datamodule, "fit", self.seed, self.channels_last) as federation,
            ExitStack() as stack,
        ):
            self._federation = federation
            self._set_up(found)
            existing = None if found is None else found.run_dir
            self.run_dir = stack.enter_context(open_run_dir(self.fabric, self.out_dir, existing))
            self._preemption = stack.enter_context(Preemption(self._saves))
            self._start_logs()
            try:
                self._call("on_fit_start")
                federation.module.on_fit_start()
                for round in range(len(self.history), self.max_rounds):
                    self.current_round = round
                    self._run_round(round)
                    if self.stopping:
                        self._leave()
                federation.restore(self.weights)
                federation.module.on_fit_end()
                self._call("on_fit_end")
                self._finalize_loggers("success")
            except BaseException as exception:
                federation.restore(self.weights)
                if self.average is not None:
                    self.average.copy_(self.weights)
                self._call("on_exception", exception=exception)
                self._finalize_loggers("failed")
                raise

    def _set_up(self, found: Found | None) -> None:
        federation = self._federation
        self.cohort_size = cohort_size(self.clients_per_round, len(federation.client_ids))
        work = LocalWork(self.local_steps, self.local_epochs, federation.datamodule.batch_size, self.gradient_clip_val)
        federation.view.max_rounds = self.max_rounds
        federation.view.gradient_clip_val = self.gradient_clip_val
        federation.configure_optimizers(work)
        check_algorithm(self.client, federation, self.cohort_size, self.local_steps, self.engine)
        if self.on_client_error == "skip" or self.max_update_norm is not None:
            check_unequal(self.client)
        self.weights = federation.global_weights()
        # (w_{t+1} + w_t)/2, which is evaluated where the step is adaptive. While a cohort trains, sums are made in it.
        self.average = self.weights.clone() if self.server.adaptive else None
        size, dtype = self.weights.numel(), self.weights.dtype
        self.client.set_up(self.weights, len(federation.client_ids), self.local_steps)
        self.states = ClientStates(self.fabric, self.client.client_state, size, dtype, self.client_states)
        self.server.reset()
        self.server.set_up(federation.parameters, self.compile)
        self.history = []
        self.current_round = 0
        self.stopping = False
        if self._saves or found is not None:
            self.identity = identity(self)
        settings = TrainingSettings(
            work=work,
            seed=self.seed,
            client_weights=self.client_weights,
            local_lr_decay=self.local_lr_decay,
            compile=self.compile,
            lanes=self.lanes,
            on_client_error=self.on_client_error,
            max_update_norm=self.max_update_norm,
        )
        self._training = CohortTraining(federation, self.client, self.states, self.weights, settings, self.average)
        if found is not None:
            name, self.engine_note = known_engine(self.engine, found.state["engine"])
            restore(self, found)
        else:
            # Such a callback expects to find each client's weights in the module.
            one_by_one = self.engine == "auto" and self._hooks.are_used("on_client_end")
            engine = "sequential" if one_by_one else self.engine
            name, self.engine_note = self._training.choose_engine(engine, self._sample(0))
        self._training.use_engine(name)
        has_data = self.validate_every and federation.datamodule.evaluation_data("validation") is not None
        if has_data and not is_overridden("validation_step", federation.module):
            rank_zero_warn(
                f"There is validation data, but `{type(federation.module).__name__}` does not define `validation_step`."
                " Nothing will be validated."
            )

    def _start_logs(self) -> None:
        view, module = self._federation.view, self._federation.module
        view.default_root_dir = view.log_dir = str(self.run_dir)
        if self.history:
            replay(self.fabric, self.history)
        if module.hparams:
            for logger in self.fabric.loggers:
                # Fabric's CSVLogger has no place for them.
                with suppress(NotImplementedError):
                    logger.log_hyperparams(dict(module.hparams))

    def _run_round(self, round: int) -> None:
        start = time.perf_counter()
        federation = self._federation
        federation.view.current_round = round
        cohort = self._sample(round)
        self._call("on_round_start", round=round, cohort=cohort)

        update = self._training.run(round, cohort, self._notify, lambda: self._preemption.requested)
        self._apply(update)

        if not math.isfinite(self.eta_g) or not all(map(math.isfinite, update.metrics.values())):
            rank_zero_warn(
                f"Round {round}: the update or a training metric is not finite, and later rounds will hardly recover."
                " Try a smaller local learning rate, or `gradient_clip_val`."
            )
        row = {
            "round": round,
            "eta_g": self.eta_g,
            "clients": len(update.squared_norms),
            "heterogeneity": update.heterogeneity(),
            **update.metrics,
        }
        if self.on_client_error == "skip":
            row["skipped_clients"] = len(cohort) - row["clients"]
        if self.validate_every and ((round + 1) % self.validate_every == 0 or round + 1 == self.max_rounds):
            row.update(self._validate())
        federation.restore(self.weights)
        row["seconds"] = time.perf_counter() - start
        self.history.append(row)
        federation.view.round_metrics = {name: torch.tensor(value) for name, value in row.items()}
        self.fabric.log_dict({name: value for name, value in row.items() if name != "round"}, step=round)
        # A signal after the all-reduce is for the next one, unless there is nobody to agree with.
        alone = self.fabric.world_size == 1 and self._preemption.requested
        self.stopping = self._training.stop or alone
        self._call("on_round_end", round=round)
        self._training.check_history(self.history)

    def _sample(self, round: int) -> list[int]:
        """The cohort of a round."""
        return sample_cohort(self.seed, round, len(self._federation.client_ids), self.cohort_size)

    def _apply(self, update: RoundUpdate) -> None:
        """Let the server and the algorithm step; without a client nothing moves."""
        if self.average is not None:
            self.average.copy_(self.weights)
        if len(update.squared_norms) == 0:
            self.eta_g = 0.0
            return
        self._call("on_aggregate_end", update=update)
        self.client.aggregate(self.weights, update, self.eta_g)
        if self.average is not None:
            self.average.lerp_(self.weights, 0.5)
        self._federation.buffers.update(update.float_buffers, update.float_changed, update.integer_buffers)

    def _notify(self, moment: str, client: Client) -> None:
        self._call(f"on_client_{moment}", round=self.current_round, client_id=client.name)

    def _validate(self) -> dict[str, float]:
        """Metrics of the global model: of the average of the last two iterates where the step is adaptive."""
        federation = self._federation
        self._call("on_validation_start")
        federation.restore(self.weights)
        metrics = federation.evaluate("validation")
        if self.average is not None and metrics:
            federation.parameters.load(self.average)
            metrics = {
                **federation.evaluate("validation"),
                **{f"{LAST_ITERATE}/{name}": value for name, value in metrics.items()},
            }
        self._call("on_validation_end", metrics=metrics)
        return metrics

    def _evaluate(
        self, model: LightningModule, datamodule: FederatedDataModule, stage: Stage | Literal["clients"]
    ) -> dict[str, float]:
        setup: Literal["validate", "test"] = "test" if stage == "test" else "validate"
        with Federation(self.fabric, model, datamodule, setup, self.seed, self.channels_last) as federation:
            return federation.evaluate_clients() if stage == "clients" else federation.evaluate(stage)

    def _leave(self) -> None:
        """End the process after SIGTERM; all ranks do so after the same round."""
        rank_zero_info(f'SIGTERM: saved after {len(self.history)} rounds. `ckpt_path="last"` goes on from there.')
        # Nobody leaves before the checkpoint is written: launchers end the others when one is gone.
        self.fabric.barrier()
        raise SystemExit(exit_code(self.fabric))

    def _finalize_loggers(self, status: str) -> None:
        for logger in self.fabric.loggers:
            logger.finalize(status)

    def _call(self, hook: str, **arguments: Any) -> None:
        self._hooks.call(hook, loop=self, **arguments)

    def _launch(self, function: Callable[..., Any], model: LightningModule, *arguments: Any) -> Any:
        """Run a function on all ranks, started in whatever way the strategy starts them."""
        check_instance("model", model, LightningModule)
        if isinstance(self.fabric.strategy.launcher, _MultiProcessingLauncher):
            results = run_in_processes(self.fabric, lambda: function(model, *arguments), model, self._results)
            self.server.load_state_dict(results["server"])
            self.client.load_state_dict(results["client"])
            self.history, self.run_dir = results["history"], Path(results["run_dir"])
            return results["returned"]
        if not self._launched:
            launch(self.fabric)
            self._launched = True
            atexit.register(leave_process_group)
        result = function(model, *arguments)
        # Ranks leave together, so that none closes its connections on another's last exchange.
        self.fabric.barrier()
        return result

    def _results(self) -> dict[str, Any]:
        """What a loop knows after a call, besides the model."""
        return {
            "server": self.server.state_dict(),
            "client": self.client.state_dict(),
            "history": self.history,
            "run_dir": str(self.run_dir),
        }

    @property
    def module(self) -> LightningModule:
        """The module in training."""
        return self._federation.module

    @property
    def datamodule(self) -> FederatedDataModule:
        """Its clients."""
        return self._federation.datamodule

    @property
    def client_ids(self) -> Sequence[str]:
        """The clients' names, in the order that cohorts refer to."""
        return self._federation.client_ids
