"""Validation of the global model on each client's own data."""

from __future__ import annotations

import numpy as np

from lightning_feddua.aggregation.dealing import deal
from lightning_feddua.aggregation.metric_rows import Columns, Table, exchange
from lightning_feddua.data.evaluation_data import set_of_client
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.federation import Federation
from lightning_feddua.lightning_names import is_overridden
from lightning_feddua.metric_names import large_is_worse


def evaluate_clients(federation: Federation) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """How the weights in the module do on each client's own data; a collective.

    Returns:
        The statistics over clients, and the metrics of each client by its name.
    """
    fabric, datamodule, module = federation.fabric, federation.datamodule, federation.module
    if not is_overridden("validation_step", module):
        raise ConfigurationError(
            f"`{type(module).__name__}` does not define `validation_step`.", "Log a client's metrics in it."
        )
    names = [str(name) for name in federation.client_ids]
    held_out = datamodule.val_clients
    missing = [] if held_out is None else [name for name in names if name not in held_out]
    if missing:
        raise ConfigurationError(
            f"`val_clients` has no data for client `{missing[0]}`.", "Give it a dataset for each client."
        )
    hand = deal(np.maximum(federation.sizes, 1).tolist(), fabric.world_size)[fabric.global_rank]
    rows = {}
    for client in hand:
        data = set_of_client(federation.client_data(client, "validation"), datamodule.eval_batch_size)
        with federation.hidden_state.undone():
            rows[client] = federation.evaluator.run_client(data)
    columns = exchange(fabric, Table(fabric), rows, len(names))
    return client_statistics(columns), {
        name: {metric: float(values[i]) for metric, (values, weights) in columns.items() if weights[i] > 0}
        for i, name in enumerate(names)
    }


def client_statistics(columns: Columns) -> dict[str, float]:
    """Mean, standard deviation and the mean of the worst tenth, over clients, of each metric.

    Worst is largest for a metric whose name has a word such as ``loss``, ``error`` or ``mse``, and smallest for any
    other.
    """
    results = {}
    for name, (values, weights) in columns.items():
        ordered = np.sort(values[weights > 0])
        tenth = -(-len(ordered) // 10)
        worst = ordered[-tenth:] if large_is_worse(name) else ordered[:tenth]
        results[f"{name}/mean"] = float(ordered.mean())
        results[f"{name}/std"] = float(ordered.std())
        results[f"{name}/worst_decile"] = float(worst.mean())
    return results
