"""A timm model with timm's own scheduler, as Lightning's documentation steps it."""

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from tests.packages.harness import PackageTests

timm = pytest.importorskip("timm")
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.scheduler import create_scheduler_v2  # noqa: E402

pytestmark = pytest.mark.slow


class Images(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = timm.create_model("test_resnet", pretrained=False, num_classes=3, drop_rate=0.1)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1], label_smoothing=0.1)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = create_optimizer_v2(self.model, opt="adamw", lr=1e-3, weight_decay=0.05)
        scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=10, warmup_epochs=2, warmup_lr=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch)


class TestTimm(PackageTests):
    def module(self):
        return Images()

    def client(self, index):
        generator = torch.Generator().manual_seed(index)
        size = 10 + index
        return TensorDataset(
            torch.randn(size, 3, 32, 32, generator=generator), torch.randint(3, (size,), generator=generator)
        )
