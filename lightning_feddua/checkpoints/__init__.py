from lightning_feddua.checkpoints.files import Found, find_checkpoint
from lightning_feddua.checkpoints.identity import identity
from lightning_feddua.checkpoints.loggers import replay
from lightning_feddua.checkpoints.state import capture, restore

__all__ = ["Found", "capture", "find_checkpoint", "identity", "replay", "restore"]
