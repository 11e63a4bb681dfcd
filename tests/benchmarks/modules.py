"""Networks of many kinds and sizes, as modules to train."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from lightning import LightningModule
from torch import Tensor, nn


class Trained(LightningModule):
    """Any network with a loss.

    Args:
        network: the network.
        loss: of outputs and targets.
        adam: whether the optimizer is Adam instead of SGD.
    """

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], adam: bool = False) -> None:
        super().__init__()
        self.network, self.loss, self.adam = network, loss, adam

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return (torch.optim.Adam if self.adam else torch.optim.SGD)(self.parameters(), lr=0.01)


class TokenClassifier(nn.Module):
    """Tokens to a class, by a transformer.

    Args:
        width: the size of an embedding.
        layers: the number of layers.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(79, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, 79)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.output(self.layers(self.embedding(x)).mean(1))


def mlp(*widths: int) -> nn.Module:
    """Linear layers of these widths, with ReLU between them."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def cnn(first: int, second: int, side: int, width: int) -> nn.Module:
    """Two convolutions with these channels, and two linear layers, for images of one channel."""
    inner = second * ((side - 4) // 2) ** 2
    convolutions = [nn.Conv2d(1, first, 3), nn.ReLU(), nn.Conv2d(first, second, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(inner, width), nn.ReLU(), nn.Linear(width, 10))
