"""Predictions of the model in its host, in the order of the data, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.apply_func import move_data_to_device

from lightning_feddua.aggregation.collectives import gather_objects
from lightning_feddua.data.evaluation_data import EvaluationSet
from lightning_feddua.host.evaluation import Evaluator
from lightning_feddua.host.evaluation_steps import EvaluationSteps


def predict(fabric: Fabric, evaluator: Evaluator, sets: Sequence[EvaluationSet]) -> list[Any]:
    """The outputs of ``predict_step``, batch by batch, on the CPU; a list for each of several datasets. A collective.

    Args:
        fabric: for the exchange and the precision.
        evaluator: the module, with the weights to predict with.
        sets: the data.
    """
    steps = EvaluationSteps(evaluator.module, "predict", len(sets))
    # Ranks share batches that can be indexed; a loader is read by all of them, so that all have all outputs.
    shared = all(one.count is not None for one in sets) and not evaluator.sees_all("predict")
    ranks = fabric.world_size if shared else 1
    outputs: dict[int, dict[int, Any]] = {}
    with evaluator.evaluating("predict"):
        evaluator.hook("on_predict_start")
        evaluator.hook("on_predict_epoch_start")
        for _, dataloader_idx, index, batch in evaluator.batches(sets, ranks):
            arguments = steps.arguments(batch, index, dataloader_idx)
            evaluator.hook("on_predict_batch_start", *arguments)
            with fabric.autocast():
                output = steps.step(batch, index, dataloader_idx)
            evaluator.hook("on_predict_batch_end", output, *arguments)
            outputs.setdefault(dataloader_idx, {})[index] = move_data_to_device(output, torch.device("cpu"))
        evaluator.hook("on_predict_epoch_end")
        evaluator.hook("on_predict_end")
    if ranks > 1:
        for part in gather_objects(fabric, outputs):
            for dataloader_idx, some in part.items():
                outputs.setdefault(dataloader_idx, {}).update(some)
    ordered = [
        [output for _, output in sorted(outputs.get(place, {}).items(), key=lambda item: item[0])]
        for place in range(len(sets))
    ]
    return ordered[0] if len(ordered) == 1 else ordered
