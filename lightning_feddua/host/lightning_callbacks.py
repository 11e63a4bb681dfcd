"""Callbacks that were written for Trainer, called where the module's hooks of the same names are."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning import LightningModule

from lightning_feddua.host.training_step import TRAINING_HOOKS
from lightning_feddua.lightning_names import is_overridden

if TYPE_CHECKING:
    from lightning_feddua.host.trainer.view import TrainerView

# A callback may change a batch there, or what a step has made of it.
_OF_BATCHES = ("on_validation_batch_start", "on_validation_batch_end")


class LightningCallbacks:
    """Calls the hooks of Lightning's callbacks, each before the module's own as Trainer does.

    Hooks of training are called in each client. What a callback keeps there is that client's, so that neither the order
    of clients nor the number of ranks matters; all other hooks are called over the run.

    Args:
        view: what callbacks get as ``trainer``.
        module: what they get as ``pl_module``.
        callbacks: those to call.
    """

    def __init__(self, view: TrainerView, module: LightningModule, callbacks: Sequence[Any]) -> None:
        self._view = view
        self._module = module
        self._callbacks = list(callbacks)
        self._called: dict[str, list[Any]] = {}
        self._muted = False
        for callback in self._callbacks:
            # The module's own is another one while local steps or a validation run.
            callback.log = lambda *args, **kwargs: module.log(*args, **kwargs)
            callback.log_dict = lambda *args, **kwargs: module.log_dict(*args, **kwargs)

    def overriding(self, hook: str) -> list[Any]:
        """The callbacks that define a hook of their own."""
        if hook not in self._called:
            self._called[hook] = [one for one in self._callbacks if _defines(hook, one)]
        return self._called[hook]

    def call(self, hook: str, *args: Any, **kwargs: Any) -> None:
        """Call a hook of all callbacks that define it."""
        if not self._muted or hook in _OF_BATCHES:
            for callback in self.overriding(hook):
                getattr(callback, hook)(self._view, self._module, *args, **kwargs)

    def hook(self, name: str, *args: Any) -> Any:
        """Call a hook of all callbacks and then the module's, and return what the module returns."""
        self.call(name, *args)
        return getattr(self._module, name)(*args)

    def defines(self, hook: str) -> bool:
        """Whether a callback or the module defines a hook of its own."""
        return bool(self.overriding(hook)) or is_overridden(hook, self._module)

    def training_hook(self) -> str | None:
        """A callback with a hook that is called in local steps, as the end of a sentence; None if there is none."""
        for hook in TRAINING_HOOKS:
            for callback in self.overriding(hook):
                return f"the callback `{type(callback).__name__}` has `{hook}`"
        return None

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Around a validation that a user of Trainer does not expect: only batches are still theirs to change."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def release(self) -> None:
        """Leave the callbacks as they were given."""
        for callback in self._callbacks:
            for name in ("log", "log_dict"):
                vars(callback).pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """The callbacks' states as Trainer keeps them in checkpoints."""
        states = {callback.state_key: callback.state_dict() for callback in self._callbacks}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Resume from a checkpoint."""
        states = checkpoint.get("callbacks") or {}
        self.call("on_load_checkpoint", checkpoint)
        for callback in self._callbacks:
            if callback.state_key in states:
                callback.load_state_dict(copy.deepcopy(states[callback.state_key]))


def configured_callbacks(module: LightningModule) -> list[Any]:
    """What a module's ``configure_callbacks`` returns."""
    configured = module.configure_callbacks() if is_overridden("configure_callbacks", module) else []
    return list(configured) if isinstance(configured, list | tuple) else [configured]


def _defines(hook: str, callback: Any) -> bool:
    # `LambdaCallback` has its hooks in attributes, and they may be anything that can be called.
    return hook in vars(callback) or (hasattr(callback, hook) and is_overridden(hook, callback))
