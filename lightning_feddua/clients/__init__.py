from lightning_feddua.clients.local_training import LocalTraining

__all__ = ["LocalTraining"]
