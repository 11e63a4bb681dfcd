from lightning_feddua.servers.mirror_maps.base import MirrorMap
from lightning_feddua.servers.mirror_maps.hypentropy import Hypentropy
from lightning_feddua.servers.mirror_maps.p_norm import PNorm

__all__ = ["Hypentropy", "MirrorMap", "PNorm"]
