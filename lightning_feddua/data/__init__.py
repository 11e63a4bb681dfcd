from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.data.synthetic import SyntheticRegression

__all__ = ["FederatedDataModule", "SyntheticRegression"]
