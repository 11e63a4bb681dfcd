"""Hugging Face datasets, from the hub or from a local folder with the same layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_feddua._private import has_indices
from lightning_feddua.errors import ConfigurationError, choices

if TYPE_CHECKING:
    import datasets


def load_split(path: str, split: str = "train") -> datasets.Dataset:
    """One split of a dataset.

    Args:
        path: a hub id, a local folder with the same files, or a folder written by ``save_to_disk``.
        split: the name of the split.
    """
    import datasets

    if Path(path).is_file():
        raise ConfigurationError(f"`{path}` is a file.", "Give the folder that contains it.")
    if not Path(path).is_dir() and path.startswith((".", "/", "~")):
        raise ConfigurationError(f"The folder `{path}` does not exist.", "Give an existing folder, or a hub id.")
    try:
        # Written by `save_to_disk` from a single split.
        if (Path(path) / "state.json").is_file() and split == "train":
            return datasets.load_from_disk(path)
        return datasets.load_dataset(path, split=split)
    except ValueError as error:
        if "split" in str(error).lower():
            raise ConfigurationError(
                f"The dataset `{path}` has no split `{split}`: {_one_line(error)}.", "Choose a split that exists."
            ) from error
        raise _cannot_load(path, error) from error
    except Exception as error:
        raise _cannot_load(path, error) from error


def _cannot_load(path: str, error: Exception) -> ConfigurationError:
    remedy = (
        "Give a folder with the same files as the hub, such as `train-00000-of-00001.parquet`."
        if Path(path).is_dir()
        else "Check the name and the connection to the hub, or give a local folder with the same files."
    )
    return ConfigurationError(
        f"The dataset `{path}` cannot be loaded: {type(error).__name__}: {_one_line(error)}.", remedy
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


def arrow_column(dataset: datasets.Dataset, name: str) -> Any:
    """A column as an Arrow array, which is a hundred times faster than iterating over the rows."""
    if name not in dataset.column_names:
        raise ConfigurationError(
            f"The dataset has no column `{name}`.", f"Choose one of its columns: {choices(dataset.column_names)}."
        )
    if has_indices(dataset):
        dataset = dataset.flatten_indices()
    return dataset.data.column(name)


def integer_column(dataset: datasets.Dataset, name: str) -> np.ndarray:
    """A column of labels as an array."""
    # A copy, because Arrow's memory is read-only and torch warns about that.
    values = np.array(arrow_column(dataset, name).to_numpy())
    if not np.issubdtype(values.dtype, np.integer):
        raise ConfigurationError(f"The column `{name}` holds {values.dtype}, not labels.", "Choose an integer column.")
    return values


def image_column(dataset: datasets.Dataset, name: str, rows: Sequence[int] | np.ndarray | None = None) -> Tensor:
    """Images as one uint8 tensor of shape (rows, channels, height, width)."""
    arrow_column(dataset, name)  # raises a clear error for a missing column
    chosen = dataset.select_columns([name])
    if rows is not None:
        chosen = chosen.select(rows)
    images = [np.asarray(row[name]) for row in chosen]
    stacked = torch.from_numpy(np.stack(images))
    return stacked.unsqueeze(1) if stacked.dim() == 3 else stacked.permute(0, 3, 1, 2).contiguous()


class HubRows(torch.utils.data.Dataset[Any]):
    """The rows of a Hugging Face dataset as samples: dicts of selected columns, renamed and transformed.

    Args:
        dataset: the dataset.
        columns: the content of a sample: a mapping from its keys to columns of the dataset; None for all columns.
        transform: applied to each sample.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        columns: dict[str, str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        for column in (columns or {}).values():
            arrow_column(dataset, column)
        self._dataset = dataset
        self._columns = columns
        self._transform = transform

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        batch = self._dataset[indices]
        columns = self._columns or {name: name for name in self._dataset.column_names}
        samples = [{new: batch[old][i] for new, old in columns.items()} for i in range(len(indices))]
        return samples if self._transform is None else [self._transform(sample) for sample in samples]
