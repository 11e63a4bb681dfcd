from torch import Tensor, nn

from lightning_feddua.models.classifier import Classifier

WIDTHS = (64, 128, 256, 512)


class ResNet18(Classifier):
    """ResNet-18 for small images: a 3x3 stem, GroupNorm with two groups; 11,173,962 parameters with 10 classes.

    Args:
        num_classes: the number of classes.
        lr: the local learning rate.
        weight_decay: coupled weight decay.
    """

    def __init__(self, num_classes: int = 10, lr: float = 0.01, weight_decay: float = 1e-4) -> None:
        blocks: list[nn.Module] = []
        channels = WIDTHS[0]
        for i, width in enumerate(WIDTHS):
            blocks += [_Block(channels, width, stride=1 if i == 0 else 2), _Block(width, width)]
            channels = width
        network = nn.Sequential(
            *_convolution(3, WIDTHS[0]),
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, num_classes),
        )
        super().__init__(network, num_classes, lr, weight_decay)
        self.save_hyperparameters()


class _Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.residual = nn.Sequential(*_convolution(channels, width, stride), nn.ReLU(), *_convolution(width, width))
        same = stride == 1 and channels == width
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels, width, stride, kernel=1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.residual(x) + self.shortcut(x))


def _convolution(channels: int, width: int, stride: int = 1, kernel: int = 3) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.GroupNorm(2, width)
