"""torchgeo's classification task, whose scheduler watches the validation loss."""

import pytest
import torch
from torch.utils.data import Dataset

from tests.packages.harness import PackageTests

pytest.importorskip("torchgeo")
from torchgeo.trainers import ClassificationTask  # noqa: E402

pytestmark = pytest.mark.slow


class Scenes(Dataset):
    """Samples as torchgeo's datasets have them."""

    def __init__(self, index):
        generator = torch.Generator().manual_seed(index)
        self.images = torch.randn(10 + index, 3, 32, 32, generator=generator)
        self.labels = torch.randint(3, (10 + index,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index]}


class TestClassificationTask(PackageTests):
    # Its scheduler needs the validation loss after each epoch, and the harness validates after the last one only.
    local_epochs = 1

    def module(self):
        return ClassificationTask(model="test_resnet", in_channels=3, num_classes=3)

    def client(self, index):
        return Scenes(index)
