"""A tiny run, so that the benchmark cannot rot: all variants compute the same."""

from dataclasses import replace

import pytest
import torch

from tests.benchmarks import __main__ as benchmark
from tests.benchmarks.tasks import TASKS


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_variants_agree_and_are_timed(name, monkeypatch):
    monkeypatch.setitem(TASKS, name, replace(TASKS[name], clients_per_round=3, steps=2))
    rows = benchmark.measure(name, repetitions=1, rounds=1)
    assert [label for label, _ in rows] == list(benchmark.VARIANTS)
    assert all(seconds > 0 for _, seconds in rows)


def test_a_variant_that_computes_something_else_is_refused(monkeypatch):
    monkeypatch.setitem(TASKS, "linear", replace(TASKS["linear"], clients_per_round=2, steps=1))
    monkeypatch.setitem(benchmark.VARIANTS, "wrong", lambda task, rounds: ([1.0], torch.ones(1000)))
    with pytest.raises(SystemExit, match="`wrong` computes another update"):
        benchmark.measure("linear", repetitions=1, rounds=1)
