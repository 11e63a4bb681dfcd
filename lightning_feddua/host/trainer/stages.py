"""What a run is doing, in Trainer's own words."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning import LightningModule

from lightning_feddua.lightning_names import package_of

# The stage that Trainer is in while no other has begun, by what it was called for.
_STAGES = {"fit": "TRAINING", "validate": "VALIDATING", "test": "TESTING", "predict": "PREDICTING"}


class TrainerStages:
    """``trainer.state`` and the flags that are read from it, with the enums of the module's own package.

    Args:
        module: the module.
        function: what the loop was called for, such as ``"fit"``.
    """

    def __init__(self, module: LightningModule, function: str) -> None:
        states = import_module(f"{package_of(module)}.trainer.states")
        self._stages: Any = states.RunningStage
        self._usual = self._stages[_STAGES[function]]
        self._interrupted = states.TrainerStatus.INTERRUPTED
        self.state = states.TrainerState(states.TrainerStatus.RUNNING, states.TrainerFn(function), self._usual)

    def _is(self, stage: str) -> bool:
        return bool(self.state.stage == self._stages[stage])

    def _set(self, stage: str, value: bool) -> None:
        if value:
            self.state.stage = self._stages[stage]
        elif self._is(stage):
            self.state.stage = self._usual

    @property
    def training(self) -> bool:
        """Whether this is a fit, outside of validation."""
        return self._is("TRAINING")

    @property
    def validating(self) -> bool:
        """Whether the model is validated."""
        return self._is("VALIDATING")

    @validating.setter
    def validating(self, value: bool) -> None:
        # A sanity check is a validation by another name.
        if not self.sanity_checking:
            self._set("VALIDATING", value)

    @property
    def testing(self) -> bool:
        """Whether the model is tested."""
        return self._is("TESTING")

    @testing.setter
    def testing(self, value: bool) -> None:
        self._set("TESTING", value)

    @property
    def predicting(self) -> bool:
        """Whether the model predicts."""
        return self._is("PREDICTING")

    @predicting.setter
    def predicting(self, value: bool) -> None:
        self._set("PREDICTING", value)

    @property
    def sanity_checking(self) -> bool:
        """Whether validation is tried out before the first round."""
        return self._is("SANITY_CHECKING")

    @sanity_checking.setter
    def sanity_checking(self, value: bool) -> None:
        self._set("SANITY_CHECKING", value)

    @property
    def evaluating(self) -> bool:
        """Whether the model is validated or tested."""
        return bool(self.state.stage.evaluating)

    @property
    def interrupted(self) -> bool:
        """Whether the run was interrupted."""
        return bool(self.state.status == self._interrupted)
