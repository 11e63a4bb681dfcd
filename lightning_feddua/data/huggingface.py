"""Clients of a Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_feddua.data.client_data import Collate
from lightning_feddua.data.hub import HubRows, arrow_column, integer_column, load_split
from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.data.partition import Partition
from lightning_feddua.data.partitioners import Partitioner
from lightning_feddua.data.splits import make_partition
from lightning_feddua.errors import ConfigurationError


class HuggingFaceDataModule(FederatedDataModule):
    """Clients of a Hugging Face dataset, given by a column with their names or by a partitioner.

    Args:
        path: a hub id, or a local folder with the same files.
        client_column: the column with the name of each row's client. Give either this or ``partitioner``.
        partitioner: splits the rows into clients by ``label_column``.
        label_column: the column of labels, for the partitioner, for plots, and for models that check their number of
            classes.
        columns: the content of a sample: a mapping from its keys to columns of the dataset; None for all columns.
        transform: applied to each sample, a dict.
        split: the split with the clients' data.
        val_split: the split for validation; None for no validation.
        test_split: the split for the test; None for no test.
        min_samples: with ``client_column``, drop clients with fewer samples.
        batch_size: the size of a local minibatch.
        eval_batch_size: the batch size in validation and test.
        collate_fn: turns a list of samples into a batch.
    """

    def __init__(
        self,
        path: str,
        client_column: str | None = None,
        partitioner: Partitioner | None = None,
        label_column: str | None = None,
        columns: dict[str, str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        split: str = "train",
        val_split: str | None = None,
        test_split: str | None = None,
        min_samples: int = 1,
        batch_size: int = 50,
        eval_batch_size: int = 256,
        collate_fn: Collate | None = None,
    ) -> None:
        super().__init__({}, batch_size=batch_size, eval_batch_size=eval_batch_size, collate_fn=collate_fn)
        if (client_column is None) == (partitioner is None):
            given = "neither" if client_column is None else "both"
            raise ConfigurationError(
                f"It is unclear who the clients are: {given} of `client_column` and `partitioner` given.",
                "Give exactly one of the two.",
            )
        if partitioner is not None and partitioner.needs_labels and label_column is None:
            raise ConfigurationError("The partitioner has no labels.", "Name their column with `label_column`.")
        self.path = path
        self.client_column, self.partitioner, self.label_column = client_column, partitioner, label_column
        self.columns, self.transform = columns, transform
        self.split, self.val_split, self.test_split = split, val_split, test_split
        self.min_samples = min_samples
        self.num_classes: int | None = None

    def setup(self, stage: str) -> None:
        """Load the dataset, once."""
        if self.clients:
            return
        dataset = load_split(self.path, self.split)
        labels = None if self.label_column is None else integer_column(dataset, self.label_column)
        if labels is not None:
            self.num_classes = int(labels.max(initial=-1)) + 1
        rows = HubRows(dataset, self.columns, self.transform)
        if self.client_column is not None:
            clients = Partition.from_values(rows, arrow_column(dataset, self.client_column), self.min_samples)
        else:
            assert self.partitioner is not None
            clients = make_partition(rows, self.partitioner, labels)
        clients.labels = labels
        self.clients = clients
        self.val_dataset = self._load_rows(self.val_split)
        self.test_dataset = self._load_rows(self.test_split)

    def _load_rows(self, split: str | None) -> HubRows | None:
        return None if split is None else HubRows(load_split(self.path, split), self.columns, self.transform)
