"""What a module asks its Trainer for and does not get: one clear sentence about it, and one about what to do."""

from __future__ import annotations

from lightning import LightningModule

from lightning_feddua._private import TRAINER_CONNECTORS
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.lightning_names import lightning_classes

_LOOPS = "Read `current_epoch`, `global_step` or `current_round` of `self.trainer` in `{}` instead."
_RUNS = "Call it on the `FederatedLoop`, outside of `{}`."
_OTHERS = "Remove its use from `{}`."

# What only a Trainer has, and what to do instead in a module.
REFUSED = {
    "fit_loop": _LOOPS,
    "validate_loop": _LOOPS,
    "test_loop": _LOOPS,
    "predict_loop": _LOOPS,
    "fit": _RUNS,
    "validate": _RUNS,
    "test": _RUNS,
    "predict": _RUNS,
}


def not_available(kind: str, path: str, name: str, module: LightningModule) -> Exception:
    """The error for an attribute that is not there.

    Lightning's own names get an error that reaches the user even from a property of the module, where torch replaces an
    AttributeError by one about the property. For any other name, it is the AttributeError that ``hasattr`` asks for.

    Args:
        kind: the class of Lightning's that the asked object stands for.
        path: the name that a module knows the object by.
        name: the attribute.
        module: who asks.
    """
    problem = f"`{path}.{name}` is not available in a federated run."
    user = type(module).__name__
    known = any(hasattr(cls, name) for cls in lightning_classes(kind)) and not name.startswith("__")
    if not known and not (kind == "Trainer" and name in {*REFUSED, *TRAINER_CONNECTORS}):
        return AttributeError(f"{problem} Remove its use from `{user}`, or guard it with `hasattr({path}, {name!r})`.")
    advice = REFUSED.get(name, _OTHERS) if kind == "Trainer" else _OTHERS
    return ConfigurationError(problem, advice.format(user))
