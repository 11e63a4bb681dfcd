"""Graph classification as in PyG's example for Lightning, with batches of PyG's own class."""

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torchmetrics import Accuracy

from tests.packages.harness import PackageTests

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import DataLoader  # noqa: E402
from torch_geometric.nn import GIN, MLP, global_add_pool  # noqa: E402

pytestmark = pytest.mark.slow


class Graphs(LightningModule):
    def __init__(self):
        super().__init__()
        self.gnn = GIN(4, 8, 2, dropout=0.5, jk="cat")
        self.classifier = MLP([8, 8, 2], norm="batch_norm", dropout=0.5)
        self.train_acc = Accuracy(task="multiclass", num_classes=2)
        self.val_acc = Accuracy(task="multiclass", num_classes=2)

    def forward(self, x, edge_index, batch):
        return self.classifier(global_add_pool(self.gnn(x, edge_index), batch))

    def training_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index, data.batch)
        loss = nn.functional.cross_entropy(y_hat, data.y)
        self.train_acc(y_hat.softmax(dim=-1), data.y)
        self.log("train_acc", self.train_acc, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index, data.batch)
        self.val_acc(y_hat.softmax(dim=-1), data.y)
        self.log("val_acc", self.val_acc, prog_bar=True, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class TestGIN(PackageTests):
    def module(self):
        return Graphs()

    def client(self, index):
        generator = torch.Generator().manual_seed(index)
        return [
            Data(
                x=torch.randn(5, 4, generator=generator),
                edge_index=torch.randint(5, (2, 8), generator=generator),
                y=torch.randint(2, (1,), generator=generator),
            )
            for _ in range(10 + index)
        ]

    def collate_fn(self):
        return DataLoader(self.client(0), batch_size=self.batch_size).collate_fn
