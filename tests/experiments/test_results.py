import math

import numpy as np
import pytest

from lightning_feddua import ConfigurationError
from lightning_feddua.experiments.comparison_table import summarize
from lightning_feddua.experiments.results import load_methods, metric_names, result_names, spans_decades
from tests.experiments.run_folders import write_run


def test_runs_that_differ_in_their_seeds_are_one_method(tmp_path):
    for seed, values in enumerate([[1.0, 4.0, 2.0], [3.0, 16.0, 8.0]]):
        write_run(tmp_path / f"version_{seed}", [{"val_loss": v} for v in values], seed=seed)
    (method,) = load_methods([tmp_path])
    assert (method.name, len(method.runs), method.momentum) == ("FedAvg", 2, False)
    curve = method.curve("val_loss")
    np.testing.assert_allclose(curve.mean, [2, 10, 5])
    np.testing.assert_allclose(curve.high - curve.mean, [np.sqrt(2), 6 * np.sqrt(2), 3 * np.sqrt(2)])
    # On a logarithmic axis: the geometric mean, and a factor to either side.
    curve = method.curve("val_loss", log=True)
    np.testing.assert_allclose(curve.mean, [np.sqrt(3), 8, 4])
    np.testing.assert_allclose(curve.high / curve.mean, curve.mean / curve.low)
    np.testing.assert_allclose(curve.high / curve.mean, np.exp(np.std(np.log([[1, 4, 2], [3, 16, 8]]), axis=0, ddof=1)))
    assert method.last_statistics("val_loss", 2) == pytest.approx((7.5, np.std([3, 12], ddof=1)))


def test_runs_of_the_same_rule_with_other_settings_are_told_apart(tmp_path):
    write_run(tmp_path / "a", [{"loss": 1.0}], local_steps=5)
    write_run(tmp_path / "b", [{"loss": 1.0}], local_steps=10)
    write_run(tmp_path / "c", [{"loss": 1.0}], server="FedAdam", local_steps=10)
    names = [method.name for method in load_methods([tmp_path])]
    assert names == ["FedAvg (loop.local_steps=10)", "FedAvg (loop.local_steps=5)", "FedAdam"]


def test_rounds_without_validation_are_left_out_and_divergence_is_not(tmp_path):
    write_run(tmp_path / "a", [{"loss": 1.0}, {"loss": 2.0, "val_acc": 0.5}, {"loss": math.nan, "val_acc": 0.7}])
    (method,) = load_methods([tmp_path])
    assert method.curve("val_acc").rounds.tolist() == [1, 2]
    assert method.last_statistics("val_acc", 5)[0] == pytest.approx(0.6)
    assert math.isnan(method.last_statistics("val_acc", 5)[1])
    assert math.isnan(method.last_statistics("loss", 2)[0])


def test_a_line_that_is_still_being_written_does_not_count(tmp_path):
    folder = write_run(tmp_path / "a", [{"loss": 1.0}, {"loss": 2.0}])
    with (folder / "metrics.csv").open("a") as file:
        file.write("2,1.5e")
    assert load_methods([folder])[0].curve("loss").mean.tolist() == [1.0, 2.0]


def test_of_many_runs_only_finished_versions_count(tmp_path):
    folder = tmp_path / "My method/seed_0"
    write_run(folder / "version_0", [{"loss": 9.0}])
    write_run(folder / "version_1", [{"loss": 1.0}])
    write_run(folder / "version_2", [{"loss": 5.0}])
    (folder / "job.yaml").write_text("{}")
    assert load_methods([tmp_path])[0].curve("loss").mean.tolist() == [5.0]
    (folder / "finished.json").write_text('{"version": "version_1"}')
    (method,) = load_methods([tmp_path])
    assert (method.name, method.curve("loss").mean.tolist()) == ("My method", [1.0])
    (method,) = load_methods([folder / "version_0"])
    assert (method.name, method.curve("loss").mean.tolist()) == ("My method", [9.0])


def test_metrics_are_sorted_by_what_they_tell(tmp_path):
    row = {
        "eta_g": 1,
        "clients": 2,
        "heterogeneity": 1,
        "loss": 1,
        "val_acc": 1,
        "last_iterate/val_acc": 1,
        "seconds": 1,
    }
    write_run(tmp_path / "a", [row])
    write_run(tmp_path / "b", [{"eta_g": 1, "train_loss": 2}], server="FedAdam")
    methods = load_methods([tmp_path / "a"])
    assert metric_names(methods) == ["val_acc", "loss", "eta_g", "heterogeneity", "seconds"]
    assert result_names(methods) == ["val_acc"]
    assert result_names(load_methods([tmp_path / "b"])) == ["train_loss"]


def test_what_the_loop_counts_is_no_result(tmp_path):
    row = {"eta_g": 1, "clients": 2, "skipped_clients": 3, "heterogeneity": 1, "seconds": 1}
    write_run(tmp_path / "a", [{**row, "val_acc": 0.5, "train_loss": 1}])
    write_run(tmp_path / "b", [{**row, "train_loss": 2}], server="FedAdam")
    assert metric_names(load_methods([tmp_path / "a"]))[:2] == ["val_acc", "train_loss"]
    assert "skipped_clients" not in metric_names(load_methods([tmp_path / "a"]))
    table = summarize(load_methods([tmp_path / "b"]))
    assert table.metrics == ["train_loss"]
    assert "skipped_clients" not in table.markdown()


@pytest.mark.parametrize(("values", "log"), [([1, 200], True), ([1, 50], False), ([0, 200], False), ([-1, 1], False)])
def test_logarithmic_where_positive_and_over_two_decades(tmp_path, values, log):
    write_run(tmp_path / "a", [{"loss": v} for v in values])
    assert spans_decades(load_methods([tmp_path]), "loss") is log


def test_no_runs(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no run: there is no `metrics.csv`"):
        load_methods([tmp_path])


def test_the_best_is_the_least_loss_and_the_largest_accuracy(tmp_path):
    write_run(tmp_path / "a", [{"val_loss": 2.0, "val_acc": 0.5}])
    write_run(tmp_path / "b", [{"val_loss": 3.0, "val_acc": 0.9}], server="FedAdam")
    write_run(tmp_path / "c", [{"val_loss": math.nan, "val_acc": math.nan}], server="FedExP")
    lines = summarize(load_methods([tmp_path])).markdown().splitlines()
    assert lines[0] == "| method | val_loss | val_acc |"
    assert lines[2:5] == [
        "| FedAvg | **2** | 0.5 |",
        "| FedExP | not finite | not finite |",
        "| FedAdam | 3 | **0.9** |",
    ]


def test_the_best_is_told_by_whole_words_or_by_the_mode(tmp_path):
    write_run(tmp_path / "a", [{"val_cancer_acc": 0.5, "val_mape": 2.0, "val_power": 1.0}])
    write_run(tmp_path / "b", [{"val_cancer_acc": 0.9, "val_mape": 3.0, "val_power": 4.0}], server="FedAdam")
    methods = load_methods([tmp_path])
    text = summarize(methods).markdown()
    assert "| FedAvg | 0.5 | **2** | 1 |\n| FedAdam | **0.9** | 3 | **4** |" in text
    assert (
        "The best are bold: val_cancer_acc, larger is better; val_mape, smaller is better; val_power, larger is better."
        in text
    )
    text = summarize(methods, "val_power", "min").markdown()
    assert text.startswith("| method | val_power |\n|---|---|\n| FedAvg | **1** |\n| FedAdam | 4 |\n")
    assert "The best are bold: val_power, smaller is better." in text


def test_running_median_is_that_of_numpy(tmp_path):
    values = np.random.default_rng(0).normal(size=120)
    write_run(tmp_path / "a", [{"eta_g": v} for v in values])
    smooth = load_methods([tmp_path])[0].curve("eta_g").running_median()
    assert smooth[60] == np.median(values[58:63])
    assert smooth[0] == np.median(values[:3])
    write_run(tmp_path / "b/c", [{"eta_g": 1.0}] * 49)
    assert load_methods([tmp_path / "b"])[0].curve("eta_g").running_median() is None
