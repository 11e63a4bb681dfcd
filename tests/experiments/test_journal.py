"""Optuna's journal, as a kill or a full disk leaves it, and presets with names of all kinds in real commands."""

import importlib.util
import json

import pytest

from lightning_feddua import ConfigurationError
from lightning_feddua.cli import main
from lightning_feddua.experiments.sweep.search import OptunaSearch
from lightning_feddua.experiments.sweep.space import parse_space
from tests.experiments.test_compare import read, write_recipe

needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="Optuna is an extra")
SPACE = parse_space(["x=log:0.001:1", "n=int:1:9"])


def run(journal, trials=3):
    search, points = OptunaSearch(SPACE, trials, 3, journal, "study"), []
    while asked := search.ask(1):
        points += asked
        search.tell([float(point["n"]) for point in asked])
    return points


@needs_optuna
@pytest.mark.parametrize("step", [450, pytest.param(31, marks=pytest.mark.slow)])
def test_a_journal_cut_anywhere_is_gone_on_with(tmp_path, step):
    journal = tmp_path / "optuna.journal"
    whole = run(journal)
    content = journal.read_bytes()
    for end in range(0, len(content), step):
        journal.write_bytes(content[:end])
        points = run(journal)
        assert len(points) == 3, end
        # All of them, but for one that was cut short while it was being written, and what follows from it.
        assert points[0] == whole[0] or b'"value":' not in content[:end], end
        assert all(json.loads(line) for line in journal.read_text().splitlines())
        assert run(journal) == points


@needs_optuna
@pytest.mark.parametrize(
    "content", [b"nonsense\n{}\n", b'{"op_code": 0}\n{"op_code": 99}\n', b"\xff\xfe\n\n", b"[1]\n3\n"]
)
def test_a_journal_that_is_none_is_named(tmp_path, content):
    journal = tmp_path / "optuna.journal"
    journal.write_bytes(content)
    with pytest.raises(ConfigurationError, match=rf"Optuna's journal `{journal}` is damaged: "):
        run(journal)


def test_presets_with_any_name_are_rows_of_their_own_in_the_folder_that_was_asked_for(tmp_path, capsys):
    names = ["FedAvg (1)", "FedAvg [1]", "..", "../../$x$"]
    presets = {name: {"server": {"class_path": "FedAvg"}} for name in names}
    recipe = write_recipe(tmp_path / "tiny.yaml", **presets)
    out = tmp_path / "a/b/out"
    arguments = ["--config", recipe, "--loop.max_rounds", "1", "--jobs", "2", "--out", str(out)]
    assert main(["compare", *arguments]) == 0
    assert {row["method"] for row in read(out / "table.csv")} == set(names)
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml", "a"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["out"]
    capsys.readouterr()
    assert main(["compare", *arguments]) == 0
    assert "4 of them finished before" in capsys.readouterr().out
