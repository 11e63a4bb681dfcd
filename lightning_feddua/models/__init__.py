from lightning_feddua.models.classifier import Classifier
from lightning_feddua.models.cnn import FemnistCNN
from lightning_feddua.models.linear import LinearRegression
from lightning_feddua.models.lstm import CharLSTM
from lightning_feddua.models.resnet import ResNet18
from lightning_feddua.models.sparse_linear import SparseLinearRegression
from lightning_feddua.models.vit import ViT

__all__ = ["CharLSTM", "Classifier", "FemnistCNN", "LinearRegression", "ResNet18", "SparseLinearRegression", "ViT"]
