"""Federated learning for PyTorch Lightning, and the reference implementation of FedDuA (arXiv 2505.11126)."""

from lightning_feddua.__about__ import __version__
from lightning_feddua.callbacks import FederatedCallback
from lightning_feddua.clients import LocalTraining
from lightning_feddua.data import FederatedDataModule
from lightning_feddua.errors import ClientError, ConfigurationError
from lightning_feddua.loop import FederatedLoop
from lightning_feddua.reduction import RoundUpdate
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
)

__all__ = [
    "ClientError",
    "ConfigurationError",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDuAServer",
    "FedDuAdagrad",
    "FedDuAdam",
    "FedDuYogi",
    "FedExP",
    "FedExPM",
    "FedYogi",
    "FederatedCallback",
    "FederatedDataModule",
    "FederatedLoop",
    "Hypentropy",
    "LocalTraining",
    "MirrorMap",
    "PNorm",
    "RoundUpdate",
    "__version__",
]
