from torch import nn

from lightning_feddua.models.classifier import Classifier


class FemnistCNN(Classifier):
    """Two convolutions and two dense layers, 1,206,590 parameters with 62 classes.

    The pooling layer is missing from the paper's table but implied by its parameter counts.

    Args:
        num_classes: the number of classes.
        lr: the local learning rate.
        weight_decay: coupled weight decay.
    """

    def __init__(self, num_classes: int = 62, lr: float = 0.1, weight_decay: float = 1e-4) -> None:
        network = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * 12 * 12, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, num_classes),
        )
        super().__init__(network, num_classes, lr, weight_decay)
        self.save_hyperparameters()
