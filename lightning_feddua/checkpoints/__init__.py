from lightning_feddua.checkpoints.files import Found, find_checkpoint
from lightning_feddua.checkpoints.identity import identity
from lightning_feddua.checkpoints.loggers import finish_loggers, resume_logger, start_loggers
from lightning_feddua.checkpoints.restoring import restore
from lightning_feddua.checkpoints.state import capture

__all__ = [
    "Found",
    "capture",
    "find_checkpoint",
    "finish_loggers",
    "identity",
    "restore",
    "resume_logger",
    "start_loggers",
]
