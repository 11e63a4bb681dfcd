"""What a loop shows of its settings and of its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning import LightningModule
from torch import Tensor

from lightning_feddua.aggregation.backend import Backend
from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.callbacks import FederatedCallback
from lightning_feddua.callbacks.defaults import all_callbacks
from lightning_feddua.callbacks.hooks import Hooks
from lightning_feddua.callbacks.lightning import to_call
from lightning_feddua.checkpoints.state import results_of, take_results
from lightning_feddua.clients import LocalTraining
from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.host.federation import Federation
from lightning_feddua.launch.preemption import Preemption
from lightning_feddua.run import Run
from lightning_feddua.sampling import ClientSampler, UniformSampler
from lightning_feddua.servers import Server
from lightning_feddua.settings import FIXED, RunSettings


class LoopAttributes:
    """Settings by their names, and the state of the run; all of it is there before a fit, as None or empty."""

    settings: RunSettings
    run: Run
    backend: Backend
    server: Server
    client: LocalTraining
    identity: dict[str, Any]
    identity_digest: str
    # The metrics of each client in the last validation per client, by the client's name.
    client_metrics: dict[str, dict[str, float]]
    _federation: Federation | None
    _given_callbacks: list[FederatedCallback]
    _hooks: Hooks
    _preemption: Preemption
    # What forked ranks, whose federation this process has never seen, have told of it.
    _elsewhere: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        # Only for what is not an attribute of the loop itself.
        if name in RunSettings.__dataclass_fields__:
            return getattr(self.settings, name)
        raise AttributeError(f"`FederatedLoop` has no attribute `{name}`.")

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in ("server", "client", "backend", "callbacks") and name not in vars(self)
        if own or name not in RunSettings.__dataclass_fields__:
            super().__setattr__(name, value)
        elif name in FIXED:
            raise AttributeError(f"`{name}` cannot be changed after the loop is made. Make another `FederatedLoop`.")
        else:
            self.settings = replace(self.settings, **{name: value})

    def _take_callbacks(self, configured: list[Any]) -> tuple[list[Any], list[Any]]:
        """Use the loop's callbacks with those of a module, and tell which of Lightning's to call, and all there are."""
        given = self._given_callbacks
        callbacks = all_callbacks(self.settings, self.server, configured) if configured else given
        vars(self)["callbacks"] = callbacks
        self._hooks = Hooks(callbacks)
        return to_call(callbacks)

    def _wants_to_stop(self) -> bool:
        """Whether this rank wants the run to end after this round."""
        return self._preemption.requested or self._preemption.interrupted or self.run.stop_request is not None

    def _results(self) -> dict[str, Any]:
        """What a loop knows after a call, besides the model."""
        shown: dict[str, Any] = {"engine_note": self.engine_note, "cohort_size": self.cohort_size}
        shown["client_ids"] = [str(name) for name in self.client_ids]
        shown["client_metrics"] = self.client_metrics
        run = {"folder": str(self.run.folder), "run": self.run.state_dict()}
        return {**run, "parts": results_of(self), "shown": shown, "identity": self.identity}  # type: ignore[arg-type]

    def _take_results(self, results: dict[str, Any]) -> None:
        """The same in the parent of forked ranks, where nothing of it has happened."""
        self.run = Run(Path(results["folder"]))
        self.run.load_state_dict(results["run"])
        self.identity, self._elsewhere = results["identity"], results["shown"]
        self.client_metrics = self._elsewhere["client_metrics"]
        take_results(self, results["parts"])  # type: ignore[arg-type]

    @property
    def out_dir(self) -> Path:
        """Where runs are kept."""
        return Path(self.settings.out_dir)

    @property
    def sampler(self) -> ClientSampler:
        """Draws the cohorts."""
        return self.settings.sampler or UniformSampler(self.settings.clients_per_round)

    @property
    def states(self) -> ClientStates | None:
        """What the clients' algorithm keeps for each of them; None before a fit."""
        return getattr(self.backend, "states", None)

    @property
    def weights(self) -> Tensor | None:
        """The global weights, flat; None before a fit."""
        return self.run.weights

    @property
    def average(self) -> Tensor | None:
        """The average of the last two iterates, where that is what is validated."""
        return self.run.average

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row for each finished round."""
        return self.run.history

    @property
    def current_round(self) -> int:
        """The round, from 0."""
        return self.run.round

    @property
    def run_dir(self) -> Path:
        """The folder of the run; before a fit, where runs are kept."""
        return self.run.folder

    @property
    def eta_g(self) -> float:
        """The server's last step."""
        return self.run.eta_g

    @eta_g.setter
    def eta_g(self, eta_g: float) -> None:
        self.run.eta_g = eta_g

    @property
    def should_stop(self) -> bool:
        """Whether the run is to end after this round. Set it from any callback, on any rank, to end the run in order.

        Callbacks see ``on_fit_end``, the run is saved, and ``fit`` returns. It can be resumed.
        """
        return self.run.stop_request is not None or self.stopping

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self.run.stop_request = "`should_stop` was set" if stop else None

    @property
    def stopping(self) -> bool:
        """Whether the run ends after this round, as far as all ranks know by now."""
        return self.run.stop_reason is not None

    @stopping.setter
    def stopping(self, stop: bool) -> None:
        self.should_stop = stop

    @property
    def cohort_size(self) -> int | None:
        """How many clients take part in a round; None before a fit, and where that varies."""
        if self._federation is None:
            return self._elsewhere.get("cohort_size")
        return self.sampler.size(len(self._federation.client_ids))

    @property
    def engine_note(self) -> str:
        """The engine, and why."""
        return self.backend.engine_note or self._elsewhere.get("engine_note", "")

    @property
    def module(self) -> LightningModule | None:
        """The module in training; None before a fit."""
        return None if self._federation is None else self._federation.module

    @property
    def datamodule(self) -> FederatedDataModule | None:
        """Its clients; None before a fit."""
        return None if self._federation is None else self._federation.datamodule

    @property
    def client_ids(self) -> Sequence[str]:
        """The clients' names, in the order that cohorts refer to; empty before a fit."""
        return self._elsewhere.get("client_ids", []) if self._federation is None else self._federation.client_ids
