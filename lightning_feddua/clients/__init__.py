from lightning_feddua.clients.adaalter import AdaAlter
from lightning_feddua.clients.combined import Combined
from lightning_feddua.clients.feddualavg import FedDualAvg
from lightning_feddua.clients.fedmid import FedMid
from lightning_feddua.clients.fedprox import FedProx
from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.clients.mime import Mime, MimeLite
from lightning_feddua.clients.scaffnew import Scaffnew
from lightning_feddua.clients.scaffold import Scaffold

__all__ = [
    "AdaAlter",
    "Combined",
    "FedDualAvg",
    "FedMid",
    "FedProx",
    "LocalRound",
    "LocalTraining",
    "Mime",
    "MimeLite",
    "Scaffnew",
    "Scaffold",
]
