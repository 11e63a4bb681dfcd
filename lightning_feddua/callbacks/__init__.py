from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.callbacks.checkpoint import Checkpoint
from lightning_feddua.callbacks.csv_log import CSVLog
from lightning_feddua.callbacks.early_stopping import EarlyStopping
from lightning_feddua.callbacks.progress import ProgressBar
from lightning_feddua.callbacks.run_info import RunInfo
from lightning_feddua.callbacks.tensorboard import TensorBoard

__all__ = ["CSVLog", "Checkpoint", "EarlyStopping", "FederatedCallback", "ProgressBar", "RunInfo", "TensorBoard"]
