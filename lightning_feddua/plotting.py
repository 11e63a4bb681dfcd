"""Pictures. Matplotlib is an extra and is imported only here, when a picture is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lightning_feddua.errors import ConfigurationError


def plot_labels(counts: np.ndarray, path: Path, title: str) -> None:
    """Draw how labels are distributed over clients: a row for each client, its size on the right.

    Args:
        counts: the number of samples of each client (row) and label (column).
        path: where to save the picture; its ending chooses the format.
        title: what the data is.
    """
    plt = _pyplot()
    clients, labels = counts.shape
    figure, (shares, sizes) = plt.subplots(
        1, 2, sharey=True, figsize=(9, min(10, 2 + 0.08 * clients)), width_ratios=(4, 1), layout="constrained"
    )
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    image = shares.imshow(fractions, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
    figure.colorbar(image, ax=shares, label="share of the client's samples")
    shares.set(xlabel=f"label ({labels})", ylabel=f"client ({clients})", title=title)
    sizes.barh(np.arange(clients), counts.sum(axis=1), height=0.9, color="#0072B2")
    sizes.set(xlabel="samples")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError(
            "Matplotlib is not installed, and a picture was asked for.", 'Run `pip install "lightning-feddua[plot]"`.'
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
