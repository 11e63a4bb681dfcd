"""FEMNIST: handwritten characters, a client for each writer (LEAF)."""

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_feddua.data.hub import arrow_column, image_column, integer_column, load_split
from lightning_feddua.data.natural import NaturalDataModule
from lightning_feddua.data.partition import Partition


class Femnist(NaturalDataModule):
    """Writers with enough samples, each split 90/10 at random; the test parts are pooled for validation.

    Pixels are in [0, 1], 62 classes.

    Args:
        path: a hub id, or a local folder with the files that the hub has.
        num_clients: the number of writers, drawn at random.
        min_samples: the least number of samples of a writer.
        train_fraction: the part of a writer's samples that is trained on.
        batch_size: the size of a local minibatch.
        eval_batch_size: the size of a batch in validation.
        seed: of the choice of writers and of the split.
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
        """Load and split, once."""
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
        sizes = np.array([len(r) for r in train])
        self.clients = Partition(tensors(train), names, np.arange(sizes.sum()), sizes)
        self.val_dataset = self.test_dataset = tensors(test)
        test_sizes = np.array([len(r) for r in test])
        self.val_clients = Partition(self.val_dataset, names, np.arange(test_sizes.sum()), test_sizes)
