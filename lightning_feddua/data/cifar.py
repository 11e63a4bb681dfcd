"""CIFAR-10 and CIFAR-100, split into clients by a Dirichlet distribution."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_feddua.data.hub import image_column, integer_column, load_split
from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.data.partitioners import EqualDirichletPartitioner, Partitioner
from lightning_feddua.data.splits import make_partition

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
PADDING = 4


class Cifar(FederatedDataModule):
    """Normalised images of 32 by 32 pixels; each training image is cropped and flipped at random.

    Images are stored as bytes, and converted on the device.

    Args:
        path: a hub id, or a local folder with the same files.
        label_column: the column of labels: ``label`` for CIFAR-10, ``fine_label`` for CIFAR-100.
        partitioner: splits the training images; by default into 100 clients of equal size, with Dirichlet α = 0.3.
        batch_size: the size of a local minibatch.
        eval_batch_size: the batch size in validation and test.
    """

    def __init__(
        self,
        path: str = "uoft-cs/cifar10",
        label_column: str = "label",
        partitioner: Partitioner | None = None,
        batch_size: int = 50,
        eval_batch_size: int = 500,
    ) -> None:
        super().__init__({}, batch_size=batch_size, eval_batch_size=eval_batch_size)
        self.path = path
        self.label_column = label_column
        self.partitioner = partitioner if partitioner is not None else EqualDirichletPartitioner(100, alpha=0.3)
        self.num_classes = 0
        self._mean = torch.tensor(MEAN).view(3, 1, 1) * 255
        self._std = torch.tensor(STD).view(3, 1, 1) * 255

    def setup(self, stage: str) -> None:
        """Load and split the images, unless that is done already."""
        if self.clients:
            return
        train, train_labels = self._load("train")
        self.val_dataset, test_labels = self._load("test")
        self.test_dataset = self.val_dataset
        self.num_classes = int(max(train_labels.max(), test_labels.max())) + 1
        self.clients = make_partition(train, self.partitioner, train_labels)

    def _load(self, split: str) -> tuple[TensorDataset, np.ndarray]:
        dataset = load_split(self.path, split)
        labels = integer_column(dataset, self.label_column)
        return TensorDataset(image_column(dataset, "img"), torch.from_numpy(labels)), labels

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Augment training images, and normalise all images."""
        images, labels = batch
        if self.trainer is not None and self.trainer.training:
            images = random_flip(random_crop(images, PADDING))
        dtype = torch.get_default_dtype()
        images = images.to(dtype).sub_(self._mean.to(images.device, dtype)).div_(self._std.to(images.device, dtype))
        return [images, labels]


def random_crop(images: Tensor, padding: int) -> Tensor:
    """Shift each image by up to ``padding`` pixels in each direction, and fill the border with black."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    top, left = torch.randint(2 * padding + 1, (2, count, 1), device=images.device)
    rows = top + torch.arange(height, device=images.device)
    columns = left + torch.arange(width, device=images.device)
    sample = torch.arange(count, device=images.device)
    # Advanced indices around a slice move the channels to the end.
    return padded[sample[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def random_flip(images: Tensor) -> Tensor:
    """Mirror each image with probability one half."""
    flip = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flip, images.flip(-1), images)
