"""The federated loop: sample, train locally, reduce, step the server, validate, log."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import LightningModule
from lightning.fabric.loggers import Logger
from lightning.fabric.strategies.launchers import _MultiProcessingLauncher
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import Dataset

from lightning_feddua.callbacks import CSVLog, FederatedCallback, ProgressBar
from lightning_feddua.clients.engine import Client, GlobalState, LocalWork
from lightning_feddua.clients.local_training import LocalTraining
from lightning_feddua.clients.selection import make_engine
from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.evaluation import Stage
from lightning_feddua.federation import Federation
from lightning_feddua.launching import leave_process_group, make_fabric, run_in_processes
from lightning_feddua.reduction import Reduction
from lightning_feddua.run_dir import new_run_dir
from lightning_feddua.sampling import deal, sample_cohort
from lightning_feddua.servers import FedDuAdagrad, FedDuAServer
from lightning_feddua.settings import (
    as_datamodule,
    check_choice,
    check_instance,
    check_positive,
    check_settings,
    cohort_size,
)

ENGINES = ("auto", "sequential", "vectorized")
CLIENT_WEIGHTS = ("uniform", "samples")
# Prefix of the metrics of w_{t+1}, where the plain names are those of the averaged iterate.
LAST_ITERATE = "last_iterate"


class FederatedLoop:
    """Trains a LightningModule over many clients, on one device or many.

    Each round a cohort of clients is dealt to the ranks; every rank trains its clients with the module's own optimizer,
    one all-reduce collects the mean update and the clients' squared norms, and the server, a callback, moves the global
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
        validate_every: validate after every so many rounds and after the last; 0 for never.
        out_dir: where runs are kept; each gets a folder ``version_N`` of its own.
        seed: of cohorts, minibatches and everything random in local steps.
        accelerator: as in Fabric.
        strategy: as in Fabric; ``"ddp"`` and its kin.
        devices: as in Fabric; under torchrun, the processes it started.
        num_nodes: as in Fabric.
        precision: as in Fabric.
        callbacks: a callback or a list of them.
        loggers: Fabric or Lightning loggers; ``metrics.csv`` is written in any case.
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
        server: FedDuAServer | None = None,
        client: LocalTraining | None = None,
        max_rounds: int = 500,
        clients_per_round: int | float | None = None,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        client_weights: Literal["uniform", "samples"] = "uniform",
        gradient_clip_val: float | None = None,
        local_lr_decay: float = 1.0,
        engine: Literal["auto", "sequential", "vectorized"] = "auto",
        validate_every: int = 1,
        out_dir: str | Path = "runs",
        seed: int = 0,
        accelerator: str = "auto",
        strategy: str = "auto",
        devices: int | list[int] | str = "auto",
        num_nodes: int = 1,
        precision: str = "32-true",
        callbacks: FederatedCallback | Sequence[FederatedCallback] | None = None,
        loggers: Logger | list[Logger] | None = None,
        enable_progress_bar: bool = True,
    ) -> None:
        check_settings(max_rounds, clients_per_round, local_steps, local_epochs, validate_every, seed)
        check_positive("gradient_clip_val", gradient_clip_val)
        check_positive("local_lr_decay", local_lr_decay)
        check_instance("server", server, FedDuAServer)
        check_instance("client", client, LocalTraining)
        check_choice("engine", engine, ENGINES)
        check_choice("client_weights", client_weights, CLIENT_WEIGHTS)
        self.server = server if server is not None else FedDuAdagrad()
        self.client = client if client is not None else LocalTraining()
        self.max_rounds = max_rounds
        self.clients_per_round = clients_per_round
        self.local_steps, self.local_epochs = local_steps, local_epochs
        self.client_weights = client_weights
        self.gradient_clip_val = gradient_clip_val
        self.local_lr_decay = local_lr_decay
        self.engine = engine
        self.validate_every = validate_every
        self.out_dir = Path(out_dir)
        self.seed = seed
        if isinstance(callbacks, FederatedCallback):
            callbacks = [callbacks]
        # The server steps last in `on_aggregate_end`; what reports on a round comes last of all.
        self.callbacks: list[FederatedCallback] = [*(callbacks or []), self.server, CSVLog()]
        if enable_progress_bar:
            self.callbacks.append(ProgressBar())
        self.fabric = make_fabric(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            callbacks=self.callbacks,
            loggers=loggers,
        )
        self._launched = False
        self.run_dir = self.out_dir
        self.history: list[dict[str, Any]] = []
        self.current_round = 0
        self.eta_g = 0.0

    def fit(self, model: LightningModule, datamodule: FederatedDataModule | Mapping[str, Dataset[Any]]) -> None:
        """Run all rounds. The model holds the final global weights afterwards.

        Args:
            model: any LightningModule.
            datamodule: the clients; a mapping of datasets by client name will do.
        """
        self._launch(self._fit, model, as_datamodule(datamodule))

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

    def _fit(self, model: LightningModule, datamodule: FederatedDataModule) -> None:
        with Federation(self.fabric, model, datamodule, "fit", self.seed) as federation:
            self._federation = federation
            self._set_up()
            try:
                self._call("on_fit_start")
                federation.module.on_fit_start()
                for round in range(self.max_rounds):
                    self.current_round = round
                    self._run_round(round)
                federation.restore(self.weights)
                federation.module.on_fit_end()
                self._call("on_fit_end")
                self._finalize_loggers("success")
            except BaseException as exception:
                federation.restore(self.weights)
                self._call("on_exception", exception=exception)
                self._finalize_loggers("failed")
                raise

    def _set_up(self) -> None:
        federation = self._federation
        self.cohort_size = cohort_size(self.clients_per_round, len(federation.client_ids))
        work = LocalWork(self.local_steps, self.local_epochs, federation.datamodule.batch_size, self.gradient_clip_val)
        self._work = work
        federation.view.max_rounds = self.max_rounds
        federation.configure_optimizers(work)
        self.weights = federation.global_weights()
        self._previous = torch.empty_like(self.weights) if self.server.adaptive else None
        self._reduction = Reduction(self.fabric, self.weights.numel(), self.weights.dtype, federation.buffers)
        first = self._deal_clients(sample_cohort(self.seed, 0, len(federation.client_ids), self.cohort_size))
        # Such a callback expects to find each client's weights in the module.
        engine = "sequential" if self.engine == "auto" and self._is_used("on_client_end") else self.engine
        self._engine, self.engine_note = make_engine(engine, federation, work, first, self._global_state(0))
        self.run_dir = new_run_dir(self.fabric, self.out_dir)
        self.server.reset()
        self.history = []
        self.current_round = 0
        self._frozen_checked = False
        federation.view.default_root_dir = federation.view.log_dir = str(self.run_dir)
        if federation.datamodule.val_dataset is not None and not is_overridden("validation_step", federation.module):
            rank_zero_warn(
                f"There is validation data, but `{type(federation.module).__name__}` does not define `validation_step`."
                " Nothing will be validated."
            )
        if federation.module.hparams:
            for logger in self.fabric.loggers:
                # Fabric's CSVLogger has no place for them.
                with suppress(NotImplementedError):
                    logger.log_hyperparams(dict(federation.module.hparams))

    def _run_round(self, round: int) -> None:
        start = time.perf_counter()
        federation = self._federation
        federation.view.current_round = round
        cohort = sample_cohort(self.seed, round, len(federation.client_ids), self.cohort_size)
        self._call("on_round_start", round=round, cohort=cohort)

        self._reduction.start(len(cohort))
        global_floats = federation.buffers.global_floats(self.weights.dtype)
        for client_update in self._engine.run(self._deal_clients(cohort), self._global_state(round), self._notify):
            self._reduction.add(client_update, global_floats)
            if not self._frozen_checked:
                federation.check_frozen()
                self._frozen_checked = True
        update = self._reduction.all_reduce()

        if self._previous is not None:
            self._previous.copy_(self.weights)
        self._call("on_aggregate_end", update=update)
        federation.buffers.update(update.float_buffers, update.float_changed, update.integer_buffers)

        if not math.isfinite(self.eta_g) or not all(map(math.isfinite, update.metrics.values())):
            rank_zero_warn(
                f"Round {round}: the update or a training metric is not finite, and later rounds will hardly recover."
                " Try a smaller local learning rate, or `gradient_clip_val`."
            )
        row = {"round": round, "eta_g": self.eta_g, "clients": len(update.squared_norms), **update.metrics}
        if self.validate_every and ((round + 1) % self.validate_every == 0 or round + 1 == self.max_rounds):
            row.update(self._validate())
        federation.restore(self.weights)
        row["seconds"] = time.perf_counter() - start
        self.history.append(row)
        federation.view.callback_metrics = {name: torch.tensor(value) for name, value in row.items()}
        self.fabric.log_dict({name: value for name, value in row.items() if name != "round"}, step=round)
        self._call("on_round_end", round=round)

    def _deal_clients(self, cohort: list[int]) -> list[Client]:
        """This rank's part of a cohort."""
        federation = self._federation
        # Where all do as many steps, nobody's size is asked for: it may take making a dataset to find out.
        equal = self._work.steps is not None
        costs = [1] * len(cohort) if equal else [self._work.batches(int(federation.sizes[i])) for i in cohort]
        hands = deal(costs, self.fabric.world_size)
        clients = []
        for position in hands[self.fabric.global_rank]:
            index = cohort[position]
            data = federation.client_data(index)
            weight = 1.0 if self.client_weights == "uniform" else float(len(data))
            clients.append(Client(position, index, str(federation.client_ids[index]), data, weight))
        return clients

    def _global_state(self, round: int) -> GlobalState:
        decay = self.local_lr_decay**round
        return GlobalState(round, self.seed, self.weights, decay)

    def _notify(self, moment: str, client: Client) -> None:
        self._call(f"on_client_{moment}", round=self.current_round, client_id=client.name)

    def _validate(self) -> dict[str, float]:
        """Metrics of the global model: of the average of the last two iterates where the step is adaptive."""
        federation = self._federation
        self._call("on_validation_start")
        federation.restore(self.weights)
        metrics = federation.evaluate("validation")
        if self._previous is not None and metrics:
            federation.parameters.load(self._previous.lerp_(self.weights, 0.5))
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
        with Federation(self.fabric, model, datamodule, setup, self.seed) as federation:
            return federation.evaluate_clients() if stage == "clients" else federation.evaluate(stage)

    def _finalize_loggers(self, status: str) -> None:
        for logger in self.fabric.loggers:
            logger.finalize(status)

    def _call(self, hook: str, **arguments: Any) -> None:
        # Fabric inspects signatures on each call, so hooks that nobody overrides are left out.
        if self._is_used(hook):
            self.fabric.call(hook, loop=self, **arguments)

    def _is_used(self, hook: str) -> bool:
        return any(getattr(type(c), hook, None) is not getattr(FederatedCallback, hook) for c in self.callbacks)

    def _launch(self, function: Callable[..., Any], model: LightningModule, *arguments: Any) -> Any:
        """Run a function on all ranks, started in whatever way the strategy starts them."""
        check_instance("model", model, LightningModule)
        if isinstance(self.fabric.strategy.launcher, _MultiProcessingLauncher):
            results = run_in_processes(self.fabric, lambda: function(model, *arguments), model, self._results)
            self.server.load_state_dict(results["server"])
            self.history, self.run_dir = results["history"], Path(results["run_dir"])
            return results["returned"]
        if not self._launched:
            self.fabric.launch()
            self._launched = True
            atexit.register(leave_process_group)
        result = function(model, *arguments)
        # Ranks leave together, so that none closes its connections on another's last exchange.
        self.fabric.barrier()
        return result

    def _results(self) -> dict[str, Any]:
        """What a loop knows after a call, besides the model."""
        return {"server": self.server.state_dict(), "history": self.history, "run_dir": str(self.run_dir)}

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
