from lightning_feddua.servers.base import Server
from lightning_feddua.servers.feddua import FedDuAServer
from lightning_feddua.servers.mirror_maps import Hypentropy, MirrorMap, PNorm
from lightning_feddua.servers.rules import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDuAdagrad,
    FedDuAdam,
    FedDuYogi,
    FedExP,
    FedExPM,
    FedYogi,
)

__all__ = [
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
    "Hypentropy",
    "MirrorMap",
    "PNorm",
    "Server",
]
