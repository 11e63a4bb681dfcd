from lightning_feddua.data.cifar import Cifar
from lightning_feddua.data.femnist import Femnist
from lightning_feddua.data.huggingface import HuggingFaceDataModule
from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.data.partition import Partition
from lightning_feddua.data.partitioners import (
    DirichletPartitioner,
    EqualDirichletPartitioner,
    IIDPartitioner,
    NaturalPartitioner,
    Partitioner,
    PathologicalPartitioner,
    QuantitySkewPartitioner,
    ShardPartitioner,
)
from lightning_feddua.data.shakespeare import Shakespeare
from lightning_feddua.data.sparse_regression import SparseRegression
from lightning_feddua.data.synthetic import SyntheticRegression
from lightning_feddua.data.wrapped import PartitionedDataModule

__all__ = [
    "Cifar",
    "DirichletPartitioner",
    "EqualDirichletPartitioner",
    "FederatedDataModule",
    "Femnist",
    "HuggingFaceDataModule",
    "IIDPartitioner",
    "NaturalPartitioner",
    "Partition",
    "PartitionedDataModule",
    "Partitioner",
    "PathologicalPartitioner",
    "QuantitySkewPartitioner",
    "Shakespeare",
    "ShardPartitioner",
    "SparseRegression",
    "SyntheticRegression",
]
