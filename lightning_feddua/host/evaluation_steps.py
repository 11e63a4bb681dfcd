"""How a module's steps and hooks of validation, test and prediction are called for one dataset or several."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_feddua.data.evaluation_data import Stage
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.log_capture import LogCapture
from lightning_feddua.lightning_names import is_overridden


class EvaluationSteps:
    """Calls a stage's step with the arguments that it takes; one clear error for a signature that does not fit.

    Args:
        module: the module.
        stage: the stage.
        count: the number of datasets.
    """

    def __init__(self, module: LightningModule, stage: Stage, count: int) -> None:
        self.stage = stage
        self._several = count > 1
        self._step = getattr(module, f"{stage}_step")
        self._takes_batch_idx = is_param_in_hook_signature(self._step, "batch_idx", min_args=2)
        for name in (f"{stage}_step", f"on_{stage}_batch_start", f"on_{stage}_batch_end"):
            if is_overridden(name, module):
                self._check(module, name, count)

    def _check(self, module: LightningModule, name: str, count: int) -> None:
        parameters = inspect.signature(getattr(module, name)).parameters
        found = parameters.get("dataloader_idx")
        owner = f"`{type(module).__name__}.{name}`"
        takes_any = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())
        if self._several and found is None and not takes_any:
            raise ConfigurationError(
                f"{owner} takes no `dataloader_idx`, and there are {count} datasets for {self.stage}.",
                "Add the argument `dataloader_idx`.",
            )
        if not self._several and found is not None and found.default is found.empty:
            raise ConfigurationError(
                f"{owner} needs a `dataloader_idx`, and there is one dataset for {self.stage} alone.",
                "Write `dataloader_idx=0`, or remove it.",
            )

    def arguments(self, batch: Any, batch_idx: int, dataloader_idx: int) -> tuple[Any, ...]:
        """What hooks get."""
        return (batch, batch_idx, dataloader_idx) if self._several else (batch, batch_idx)

    def step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """Call the step."""
        known = {"batch_idx": batch_idx} if self._takes_batch_idx else {}
        if self._several:
            known["dataloader_idx"] = dataloader_idx
        # By position, as Trainer does: the names are the user's own.
        return self._step(batch, *known.values())


class LoaderLogCapture(LogCapture):
    """Also tells apart what is logged for several datasets, by the end of the name as under Trainer.

    Args:
        device: where scalars are kept.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # Which of several datasets the present batch comes from; None if there is one alone, or no batch.
        self.dataloader_idx: int | None = None
        # Names that were logged for one dataset without its number, and for which.
        self._owners: dict[str, int] = {}

    def start_run(self) -> None:
        """Begin with the first dataset."""
        self.dataloader_idx = None
        self._owners = {}

    def log(self, name: str, value: Any, *args: Any, add_dataloader_idx: bool = True, **kwargs: Any) -> None:
        """Has the signature of ``LightningModule.log``."""
        if self.dataloader_idx is not None:
            if add_dataloader_idx:
                name = f"{name}/dataloader_idx_{self.dataloader_idx}"
            elif self._owners.setdefault(name, self.dataloader_idx) != self.dataloader_idx:
                raise ValueError(
                    f"`self.log({name!r}, add_dataloader_idx=False)` was called for the datasets {self._owners[name]}"
                    f" and {self.dataloader_idx}, which would mix their values. Give each its own name."
                )
        super().log(name, value, *args, **kwargs)
