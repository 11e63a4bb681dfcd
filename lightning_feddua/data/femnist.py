"""FEMNIST: handwritten characters, one client per writer (LEAF)."""

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_feddua.data.hub import arrow_column, image_column, integer_column, load_split
from lightning_feddua.data.natural import NaturalDataModule
from lightning_feddua.data.partition import Partition


class Femnist(NaturalDataModule):
    """Writers with enough samples. A random part of each is for training, and the rest is pooled for validation.

    There are 62 classes. Pixels are in [0, 1].

    Args:
        path: a hub id, or a local folder with the same files.
        num_clients: the number of writers, chosen at random; None for all.
        min_samples: the minimum number of samples per writer.
        train_fraction: the fraction of a writer's samples that is for training.
        batch_size: the size of a local minibatch.
        eval_batch_size: the batch size in validation and test.
        seed: the seed of the choice of writers and of the split.
    """

    num_classes = 62

    def __init__(
        self,
        path: str = "flwrlabs/femnist",
        num_clients: int | None = 100,
        min_samples: int = 100,
        train_fraction: float = 0.9,
        batch_size: int = 50,
        eval_batch_size: int = 500,
        seed: int = 0,
    ) -> None:
        super().__init__(path, num_clients, min_samples, train_fraction, batch_size, eval_batch_size, seed)

    def setup(self, stage: str) -> None:
        """Load and split the images, unless that is done already."""
        if self.clients:
            return
        dataset = load_split(self.path)
        labels = integer_column(dataset, "character")
        self.num_classes = max(self.num_classes, int(labels.max(initial=-1)) + 1)
        writers = Partition.from_values(dataset, arrow_column(dataset, "writer_id"), self.min_samples)
        rng = np.random.default_rng(self.seed)
        chosen = self.choose_clients(rng, writers)
        rows = [rng.permutation(writers.rows(i)) for i in chosen]
        cuts = [int(self.train_fraction * len(r)) for r in rows]
        train = [r[:cut] for r, cut in zip(rows, cuts, strict=True)]
        test = [r[cut:] for r, cut in zip(rows, cuts, strict=True)]

        def tensors(part: list[np.ndarray]) -> TensorDataset:
            index = np.concatenate(part)
            images = image_column(dataset, "image", index).float().div_(255)
            return TensorDataset(images, torch.from_numpy(labels[index]))

        names = [str(writers.ids[i]) for i in chosen]
        self.clients = Partition.from_sizes(tensors(train), names, [len(r) for r in train])
        self.val_dataset = self.test_dataset = tensors(test)
        self.val_clients = Partition.from_sizes(self.val_dataset, names, [len(r) for r in test])
