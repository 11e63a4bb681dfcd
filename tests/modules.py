"""Small modules that several tests train."""

import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import TensorDataset


class Classifier(LightningModule):
    """What people write: logging, BatchNorm, dropout, Adam."""

    def __init__(self, dropout=0.5, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        # No bias before BatchNorm: its gradient would be rounding noise, which Adam blows up.
        self.net = nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("train_acc", (logits.argmax(1) == y).float().mean(), prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def classification(size, seed=0):
    """Three classes of points in four dimensions."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (size,), generator=generator)
    x = torch.randn(size, 4, generator=generator) + nn.functional.one_hot(y, 4) * 2
    return TensorDataset(x, y)


class DropoutCNN(LightningModule):
    """What differs most easily between two runs: convolutions, dropout, and BatchNorm if asked for."""

    def __init__(self, batch_norm=False):
        super().__init__()
        norm = [nn.BatchNorm2d(4)] if batch_norm else []
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), *norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3))
        )

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class BatchNormCNN(DropoutCNN):
    """Wide enough that the number of threads shows in the bits of its updates."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(128, 3)),
        )


def images(size, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (size,), generator=generator)
    return TensorDataset(torch.randn(size, 1, 8, 8, generator=generator) + y.view(-1, 1, 1, 1), y)
