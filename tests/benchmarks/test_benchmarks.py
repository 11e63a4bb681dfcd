"""A tiny run of each benchmark, so that none can rot; other frameworks are left out."""

import os
import socket
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.benchmarks import choice, many_runs, overhead, population, prediction, ranks, scaling, starts
from tests.benchmarks.report import Row, plot_ratios, ratio_table
from tests.benchmarks.rounds import BARE, check, measure, variants
from tests.benchmarks.tasks import TASKS
from tests.benchmarks.variants import bare_loop
from tests.benchmarks.work import Timing, Work

LINEAR = replace(TASKS["linear"], clients_per_round=3, steps=2)


@pytest.mark.parametrize("task", [LINEAR, replace(TASKS["mlp"], clients_per_round=3, steps=2)], ids=lambda t: t.name)
def test_variants_agree_and_are_timed(task):
    candidates = variants(threads=1)
    rows = measure(task, candidates, repetitions=1, rounds=1)
    assert [row.label for row in rows] == list(candidates)
    assert all(row.seconds > 0 for row in rows)


def test_bare_loop_against_the_equations():
    work = LINEAR.work(rounds=1)
    deltas = []
    for client in work.rows[0]:
        w = np.zeros((1000, 1))
        for rows in client:
            x, y = work.inputs[rows].astype(np.float64), work.targets[rows]
            w -= work.lr * x.T @ (x @ w - y) / len(rows)
        deltas.append(w[:, 0])
    np.testing.assert_allclose(bare_loop(work).update, np.mean(deltas, axis=0), rtol=1e-4, atol=1e-8)


def test_work_and_timing_pass_through_files(tmp_path, capsys):
    work = LINEAR.work(rounds=2)
    work.save(tmp_path / "work.npz")
    loaded = Work.load(tmp_path / "work.npz")
    assert (loaded.task, loaded.lr, loaded.rows.shape) == ("linear", 0.01, (2, 3, 2, 30))
    np.testing.assert_array_equal(loaded.inputs, work.inputs)
    Timing([0.5, 0.25], np.arange(3.0)).report(tmp_path / "update.npy")
    received = Timing.received("a framework's own words" + capsys.readouterr().out, tmp_path / "update.npy")
    assert received.seconds == [0.5, 0.25]
    assert received.update.tolist() == [0, 1, 2]


@pytest.mark.parametrize("update", [np.ones(1000), np.full(1000, np.nan)], ids=["wrong", "nan"])
def test_a_variant_that_computes_something_else_is_refused(update):
    with pytest.raises(SystemExit, match="`wrong` computes another update"):
        check(LINEAR.work(rounds=1), {"wrong": lambda work: Timing([1.0], update)})


def _rank(rank, port, arguments):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = ["ranks", *arguments]
    ranks.main()


def test_two_ranks_share_a_cohort(tmp_path, capfd):
    def forked(work):
        work.save(tmp_path / "work.npz")
        files = [tmp_path / "work.npz", tmp_path / "update.npy"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = [*map(str, files), "--processes=2", "bare"]
        torch.multiprocessing.start_processes(_rank, (port, arguments), nprocs=2, start_method="fork")
        return Timing.received(capfd.readouterr().out, files[1])

    check(LINEAR.work(rounds=1), {"two ranks": forked})


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_parts_of_a_round_make_up_the_whole(engine):
    parts = overhead.parts_of_a_round(LINEAR, engine, rounds=2)
    assert set(parts) == set(overhead.PARTS)
    assert all(seconds > 0 for part, seconds in parts.items() if part != "waiting")
    assert parts["waiting"] == 0


@pytest.mark.slow
def test_parts_are_known_of_each_rank():
    found = overhead.parts_on_ranks(replace(TASKS["many"], steps=2), "sequential", rounds=1, ranks=2)
    assert len(found) == 2
    assert all(parts["local steps"] > 0 and parts["waiting"] > 0 for parts in found)


def test_a_part_inside_another_counts_once(monkeypatch):
    ticks = iter(range(100))
    stopwatch = overhead.Stopwatch()
    with monkeypatch.context() as patch:
        patch.setattr(overhead.time, "perf_counter", lambda: next(ticks))
        stopwatch._call("outer", lambda: stopwatch._call("inner", lambda: None))
    assert stopwatch.rounds[0] == {"outer": 2, "inner": 1}


def test_only_a_cohort_is_made_of_a_lazy_population():
    found = population.run("mapping with ids", 10**6)
    # Sixteen are looked at twice, by which the data is recognized.
    assert found["made"] == 1000 + 2 * 16
    assert found["memory"] > 0


def test_server_table_has_a_row_for_each_size():
    assert scaling.server_table([10, 1000], repetitions=1).count("\n") == 3


def test_commands_are_timed_from_start_to_end():
    table = starts.startup_table(1, {"slow": [sys.executable, "-c", "import time; time.sleep(0.3)"], "quick": ["true"]})
    slow, quick = (line.split("|")[1:-1] for line in table.splitlines()[2:])
    assert float(slow[1]) > 0.3
    assert (float(slow[2]), slow[4].strip()) == (1, "1.00")
    assert float(quick[2]) < 1


@pytest.mark.slow
def test_every_start_that_is_timed_works():
    assert len(starts.startup_table(1).splitlines()) == 2 + len(starts.STARTS)


@pytest.mark.slow
def test_a_sweep_is_timed_against_runs_of_their_own():
    lines = many_runs.sweep_table(1, seeds=1, rounds=2).splitlines()
    assert lines[0].startswith("| 4 runs of 2 rounds |")
    separately, swept = (line.split("|")[1:-1] for line in lines[2:])
    assert float(separately[3]) == 1
    assert float(swept[1]) > 0


def test_the_choice_of_an_engine_is_judged():
    combination = replace(choice.COMBINATIONS[choice.EPOCHS], sizes=choice.between(20, 50, 5))
    table = choice.choice_table({"few": (measured := choice.measure(combination, repetitions=1, rounds=1))})
    assert set(measured.seconds) == set(choice.ENGINES)
    assert table.splitlines()[-1].startswith("| few | ")
    # Clients, steps, and so on; the prediction is that of the run.
    one_by_one, together = measured.counts
    assert one_by_one.client == together.client == 5
    assert (measured.speedup >= 1.05) == (measured.chosen == "vectorized")


def test_ten_combinations_are_compared():
    assert len(choice.COMBINATIONS) == 10


def test_constants_are_found_again():
    rng = np.random.default_rng(0)
    counts, constants = rng.uniform(1, 100, (12, 4)), np.array([3e-4, 0.0, 2e-6, 1e-5])
    np.testing.assert_allclose(prediction.non_negative_fit(counts, counts @ constants), constants, atol=1e-9)
    # One that would be negative is left out.
    assert prediction.non_negative_fit(counts[:, :2], counts @ [1.0, -0.1, 0.0, 0.0]).min() >= 0


def test_ratios_are_to_the_first_row(tmp_path):
    rows = [Row(BARE, 0.5), Row("FederatedLoop, sequential", 0.75)]
    assert ratio_table(rows).endswith("| FederatedLoop, sequential | 0.7500 | 1.50 |")
    plot_ratios({"linear": rows}, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").stat().st_size > 1000
