"""``feddua data``: who has what."""

from pathlib import Path

import numpy as np
from jsonargparse import ArgumentParser, Namespace

from lightning_feddua.cli.construction import make
from lightning_feddua.cli.recipe_arguments import add_config_arguments, add_section
from lightning_feddua.data import FederatedDataModule
from lightning_feddua.data.evaluation_data import Stage
from lightning_feddua.experiments.plots import check_picture, plot_labels


def add_data_arguments(parser: ArgumentParser) -> None:
    """What ``feddua data`` takes."""
    add_config_arguments(parser)
    add_section(parser, "data")
    parser.add_argument("--plot", type=str | None, default=None, help="a file for the picture, such as labels.png")


def describe_data(parser: ArgumentParser, config: Namespace) -> None:
    """Print the sizes of clients, and draw their labels if that is asked for."""
    if config.plot is not None:
        check_picture(Path(config.plot))
    data: FederatedDataModule = make(parser, config).data
    data.prepare_data()
    data.setup("fit")
    sizes = data.client_sizes()
    low, median, high = (int(q) for q in np.quantile(sizes, [0, 0.5, 1]))
    print(repr(data))
    print(f"samples of a client: {low:,} to {high:,}, half have {median:,} or less")
    stages: tuple[Stage, ...] = ("validation", "test")
    for stage in stages:
        sets = data.evaluation_data(stage)
        counts = [f"{len(one.data):,} samples" if one.data is not None else "a loader" for one in sets]
        print(f"{stage}: {', '.join(counts) or 'none'}")
    if config.plot is not None:
        plot_labels(data.label_counts(), Path(config.plot), repr(data))
        print(f"picture in {config.plot}")
