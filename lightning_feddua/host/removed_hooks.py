"""Hooks of older versions of Lightning, which nobody calls any more."""

from lightning import LightningModule

from lightning_feddua.errors import ConfigurationError

# What Trainer refuses, and the hook to use instead.
REMOVED_HOOKS = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}
_BY_STAGE = {
    "fit": ("training_epoch_end", "validation_epoch_end"),
    "validate": ("validation_epoch_end",),
    "test": ("test_epoch_end",),
}


def check_removed_hooks(module: LightningModule, stage: str) -> None:
    """One clear error for a hook that Lightning removed, where Trainer refuses it too.

    Args:
        module: the module.
        stage: ``"fit"``, ``"validate"`` or ``"test"``.
    """
    for name in _BY_STAGE.get(stage, ()):
        if callable(getattr(module, name, None)):
            raise ConfigurationError(
                f"`{type(module).__name__}` implements `{name}`, which Lightning 2.0 removed.",
                f"Use `{REMOVED_HOOKS[name]}`, and keep outputs in an attribute of the module.",
            )
