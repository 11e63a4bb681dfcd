"""Federated learning for PyTorch Lightning, and the reference implementation of FedDuA (arXiv 2505.11126)."""

from lightning_feddua.__about__ import __version__
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
