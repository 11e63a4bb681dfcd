"""Federated learning for PyTorch Lightning, and the reference implementation of FedDuA (arXiv 2505.11126)."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_feddua.__about__ import __version__

if TYPE_CHECKING:
    from lightning_feddua.aggregation.backend import Backend
    from lightning_feddua.aggregation.transforms import ClipUpdateNorm, UpdateTransform
    from lightning_feddua.aggregation.update import RoundUpdate
    from lightning_feddua.callbacks import FederatedCallback
    from lightning_feddua.clients import (
        AdaAlter,
        Combined,
        FedDualAvg,
        FedMid,
        FedProx,
        LocalRound,
        LocalTraining,
        Mime,
        MimeLite,
        Scaffnew,
        Scaffold,
    )
    from lightning_feddua.data import FederatedDataModule
    from lightning_feddua.errors import ClientError, ConfigurationError
    from lightning_feddua.loop import FederatedLoop
    from lightning_feddua.run import Run
    from lightning_feddua.sampling import ClientSampler, UniformSampler
    from lightning_feddua.servers import (
        FedAdagrad,
        FedAdam,
        FedAvg,
        FedAvgM,
        FedDuAdagrad,
        FedDuAdam,
        FedDuAServer,
        FedDuYogi,
        FedExP,
        FedExPM,
        FedYogi,
        Hypentropy,
        MirrorMap,
        PNorm,
        Server,
    )
    from lightning_feddua.settings import RunSettings

__all__ = [
    "AdaAlter",
    "Backend",
    "ClientError",
    "ClientSampler",
    "ClipUpdateNorm",
    "Combined",
    "ConfigurationError",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDuAServer",
    "FedDuAdagrad",
    "FedDuAdam",
    "FedDuYogi",
    "FedDualAvg",
    "FedExP",
    "FedExPM",
    "FedMid",
    "FedProx",
    "FedYogi",
    "FederatedCallback",
    "FederatedDataModule",
    "FederatedLoop",
    "Hypentropy",
    "LocalRound",
    "LocalTraining",
    "Mime",
    "MimeLite",
    "MirrorMap",
    "PNorm",
    "RoundUpdate",
    "Run",
    "RunSettings",
    "Scaffnew",
    "Scaffold",
    "Server",
    "UniformSampler",
    "UpdateTransform",
    "__version__",
]

# Where the names come from. They are imported when one is asked for: they need torch, which takes seconds, and
# `feddua --help` should not.
_HOMES = (
    "aggregation.backend",
    "aggregation.transforms",
    "aggregation.update",
    "callbacks",
    "clients",
    "data",
    "errors",
    "loop",
    "run",
    "sampling",
    "servers",
    "settings",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"{__name__}.{home}")
            globals().update({one: vars(module)[one] for one in __all__ if one in vars(module)})
        return globals()[name]
    # A folder such as `lightning_feddua.servers`, which the names have always brought along.
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
