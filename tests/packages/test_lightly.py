"""lightly's SimCLR and MoCo, as its examples for Lightning write them, with a smaller backbone."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.packages.harness import PackageTests

pytest.importorskip("lightly")
lightning = pytest.importorskip("pytorch_lightning")
from lightly.loss import NTXentLoss  # noqa: E402
from lightly.models.modules import MoCoProjectionHead, SimCLRProjectionHead  # noqa: E402
from lightly.models.utils import deactivate_requires_grad, update_momentum  # noqa: E402
from lightly.transforms import SimCLRTransform  # noqa: E402
from lightly.utils.scheduler import cosine_schedule  # noqa: E402
from torchvision.transforms.functional import to_pil_image  # noqa: E402

pytestmark = pytest.mark.slow


def backbone():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


class SimCLR(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = backbone()
        self.projection_head = SimCLRProjectionHead(8, 16, 8)
        self.criterion = NTXentLoss()

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch, batch_index):
        (x0, x1), _, _ = batch
        loss = self.criterion(self.forward(x0), self.forward(x1))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


class MoCo(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = backbone()
        self.projection_head = MoCoProjectionHead(8, 16, 8)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NTXentLoss(memory_bank_size=(32, 8))

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()

    def training_step(self, batch, batch_idx):
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        x_query, x_key = batch[0]
        loss = self.criterion(self.forward(x_query), self.forward_momentum(x_key))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


class Pictures(Dataset):
    """Two random views of each picture, with its label and its name."""

    def __init__(self, index):
        generator = torch.Generator().manual_seed(index)
        self.pictures = [to_pil_image(torch.rand(3, 32, 32, generator=generator)) for _ in range(10 + index)]
        self.transform = SimCLRTransform(input_size=16)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.transform(self.pictures[index]), index % 3, f"{index}.png"


class Views(PackageTests):
    def client(self, index):
        return Pictures(index)

    def validation(self):
        return None


class TestSimCLR(Views):
    def module(self):
        return SimCLR()


class TestMoCo(Views):
    def module(self):
        return MoCo()
