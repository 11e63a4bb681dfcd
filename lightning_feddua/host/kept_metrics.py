"""What torchmetrics objects of a module have seen so far, for checkpoints."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.wrappers import MetricTracker

from lightning_feddua._private import set_update_count, tree_map


class _Bare(Metric):
    """Has only what every metric has."""

    def update(self) -> None:
        """Nothing to see."""

    def compute(self) -> None:
        """Nothing to say."""


_OF_EVERY_METRIC = frozenset(vars(_Bare()))


def metric_states(module: nn.Module) -> dict[str, dict[str, Any]]:
    """What each metric of a module has seen since its last reset, and what it keeps beyond that, by name."""
    found = {}
    for name, metric in _metrics(module).items():
        # Before its first update it has the states that it begins with. Some wrappers do not count all updates.
        used = metric.update_called or type(metric).forward is not Metric.forward
        states = dict(metric.metric_state) if used else {}
        found[name] = {"updates": metric.update_count, "states": states, "attributes": _attributes(metric)}
    return found


def load_metric_states(module: nn.Module, saved: dict[str, dict[str, Any]]) -> None:
    """Bring metrics to saved states. One that the module does not have any more is left out."""
    for name, part in list(module.named_modules()):
        if isinstance(part, MetricTracker):
            # It has a metric, or a collection, for each of its steps.
            while any(f"{key}.".startswith(f"{name}.{len(part)}.") for key in saved):
                part.increment()
    # Those inside of others come after them.
    for name, metric in _metrics(module).items():
        if name in saved:
            _load(metric, saved[name])


def _load(metric: Metric, saved: dict[str, Any]) -> None:
    metric.reset()
    known = {*metric.metric_state, *vars(metric)}
    if strangers := [name for name in (*saved["states"], *saved["attributes"]) if name not in known]:
        raise ValueError(f"a metric has no `{strangers[0]!r:.100}`")
    for name, value in {**saved["states"], **saved["attributes"]}.items():
        # Checkpoints are read to the CPU. Some metrics collect their samples there anyway.
        device = torch.device("cpu") if metric.compute_on_cpu and isinstance(value, list) else metric.device
        setattr(metric, name, _moved(value, device))
    set_update_count(metric, saved["updates"])


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def _metrics(module: nn.Module) -> dict[str, Metric]:
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def _attributes(metric: Metric) -> dict[str, Any]:
    """Tensors and numbers of a metric's own that are none of its states, as wrappers have them."""
    initializers = [
        inspect.signature(vars(kind)["__init__"]) for kind in type(metric).__mro__ if "__init__" in vars(kind)
    ]
    # What a metric was made with is the new object's own.
    arguments = {name for signature in initializers for name in signature.parameters}
    known = {*_OF_EVERY_METRIC, *metric.metric_state, *arguments}
    return {name: value for name, value in vars(metric).items() if name not in known and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor or a number, or a container of such."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(isinstance(key, str | int) and _is_plain(item) for key, item in value.items())
    return isinstance(value, Tensor) or type(value) in (bool, int, float)
