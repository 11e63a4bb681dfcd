import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric import Fabric

from lightning_feddua.aggregation.metric_rows import Table, means, pack, unpack


@given(st.lists(st.floats(allow_nan=False), min_size=1))
def test_float64_travels_through_float32_without_loss(values):
    values = torch.tensor(values, dtype=torch.float64)
    parts = pack(values, torch.float32)
    assert parts.dtype == torch.float32
    # The other ranks send zeros.
    assert torch.equal(unpack(parts + torch.zeros_like(parts)), values)


def test_nan_stays_nan():
    assert math.isnan(unpack(pack(torch.tensor([math.nan]), torch.float32)).item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_names_are_learnt_and_weights_count(dtype):
    table = Table(Fabric(accelerator="cpu", devices=1), ["a"])

    def exchange(rows):
        table.start()
        for index, row in rows.items():
            table.add(index, {name: (torch.tensor(v), w) for name, (v, w) in row.items()})
        window = torch.zeros(table.size(3, dtype), dtype=dtype)
        table.write(window)
        return means(table.read(window))

    assert exchange({0: {"a": (1.0, 1.0)}, 2: {"a": (4.0, 2.0), "b": (5.0, 1.0)}}) == {"a": 3.0, "b": 5.0}
    assert table.size(3, torch.float64) == 3 * (1 + 2 * 2)
    assert exchange({1: {"b": (7.0, 1.0)}}) == {"b": 7.0}
