"""Folders of runs that were cut short, or that somebody has prepared: a page, or one sentence that names the folder."""

import json
import os
import random
from pathlib import Path

import pytest
import yaml

from lightning_feddua.cli import main
from lightning_feddua.experiments import plots
from lightning_feddua.experiments import report as report_package
from lightning_feddua.experiments.jobs import _last_row
from lightning_feddua.experiments.many_runs import folder_name, seeded_job
from lightning_feddua.experiments.results import load_methods
from lightning_feddua.plain_yaml import load_yaml
from tests.experiments.run_folders import write_run


def repeated(first, line):
    """Each line names the one before it nine times."""
    pairs = zip("abcdefghi", "bcdefghij", strict=True)
    return first + "".join(line.format(after, ",".join([f"*{before}"] * 9)) for before, after in pairs)


RECIPES = {
    "a bomb": repeated("a: &a [1,1,1,1,1,1,1,1,1]\n", "{0}: &{0} [{1}]\n"),
    "a bomb of merged keys": repeated("a: &a {k: 1}\n", "{0}: &{0}\n  <<: [{1}]\n"),
    "endless": "server: &a\n  class_path: x\n  more: *a\n",
    "endless list": "x: &a [*a]\n",
    "deep": "x: " + "[" * 500 + "]" * 500,
    "deep by names": "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(200)),
    "an object": "x: !!python/object/apply:os.system ['touch never']\n",
    "a wrong date": "x: 2020-99-99\n",
    "a list": "[1, 2]\n",
    "binary": b"\xff\xfe\x00",
    "cut short": "server:\n  class_path: 'lightning_fed",
    "two documents": "a: 1\n---\nb: 2\n",
    "numbers as keys": "{1: 2, 2: 3}",
}
ODD_RECIPES = {
    "a server that is none": "server: 3\n",
    "keys of all kinds": "server: {class_path: lightning_feddua.FedAvg}\nmodel: {x: [{1: 2, a: 3}], ? [1] : 2}\n",
    "text that is none": 'server: {class_path: "lightning_feddua.\\uD800"}\n',
    "empty": "",
}


def lone_sentence(text):
    (line,) = [line for line in text.splitlines() if line.startswith("feddua: error")]
    return line


def report(folder, tmp_path, capsys, recwarn):
    """The page and the warnings, or the error."""
    page = tmp_path / "page.html"
    code = main(["report", str(folder), "--out", str(page)])
    errors = capsys.readouterr().err
    if code:
        assert code == 2
        assert not page.exists()
        return errors.splitlines()[-1]
    return page.read_text() + "".join(str(one.message) for one in recwarn)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_is_none_is_named_and_the_run_is_shown(tmp_path, capsys, recwarn, name):
    write_run(tmp_path / "runs/whole", [{"val_loss": 1.0}])
    folder = write_run(tmp_path / "runs/broken", [{"val_loss": 2.0}])
    content = RECIPES[name]
    (folder / "recipe.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    told = report(tmp_path / "runs", tmp_path, capsys, recwarn)
    assert f"The `recipe.yaml` in `{folder}` is damaged: " in told
    assert "<summary>broken</summary>" in told
    assert "<summary>FedAvg</summary>" in told


@pytest.mark.parametrize("name", ODD_RECIPES)
def test_an_odd_recipe_makes_a_page(tmp_path, capsys, recwarn, name):
    folder = write_run(tmp_path / "runs/odd", [{"val_loss": 2.0}])
    (folder / "recipe.yaml").write_text(ODD_RECIPES[name])
    assert "<summary>" in report(tmp_path / "runs", tmp_path, capsys, recwarn)


LOGS = {
    "a line in the middle is cut short": ("round,loss,val_loss\n0,1,2\n1,1\n2,1,3\n", [2.0, 3.0]),
    "a line goes on": ("round,loss,val_loss\n0,1,2\n1,1,2,5\n2,1,3\n", [2.0, 3.0]),
    "text": ("round,loss,val_loss\n0,a,2\n1,b,nan\n2,c,inf\n", [2.0, float("nan"), float("inf")]),
    "rounds in disorder, and twice": ("round,loss,val_loss\n2,1,5\n0,1,2\n2,1,3\n", [2.0, 3.0]),
    "rounds that are none": ("round,loss,val_loss\n0,1,2\nx,1,2\n1e400,1,2\n-1,1,2\n1e30,1,2\n.5,1,1\n,1,1\n", [2.0]),
    "no header": ("0,1,2\n1,1,2\n", None),
    "two columns of a name": ("round,val_loss,val_loss\n0,1,2\n", None),
    "nothing": ("", None),
    "a header alone": ("round,val_loss\n", None),
    "a half header": ("round,val_lo", None),
    "no text": (b"round,val_loss\n0,\xff\xfe\n", None),
    "a cell without end": ('round,val_loss\n0,"' + "1" * 200_000 + "\n", None),
    "bookkeeping alone": ("round,clients\n0,3\n", None),
}


@pytest.mark.parametrize("name", LOGS)
def test_of_a_log_counts_what_is_whole(tmp_path, capsys, recwarn, name):
    folder = write_run(tmp_path / "runs/version_0", [{"val_loss": 1.0}])
    content, values = LOGS[name]
    (folder / "metrics.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    told = report(tmp_path / "runs", tmp_path, capsys, recwarn) if values or name != "bookkeeping alone" else ""
    if values:
        (method,) = load_methods([tmp_path / "runs"])
        assert repr(method.runs[0].columns["val_loss"][1].tolist()) == repr(values)
        assert "<summary>FedAvg</summary>" in told
    elif told:
        assert str(tmp_path / "runs") in told
    else:
        assert main(["plot", str(folder), "--out", str(tmp_path / "x.png")]) == 2
        assert "have logged no metric that could be drawn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("run.json", '{"header": 3, "environment": ["torch"]}'),
        ("run.json", '{"header": {"a": "\\ud800"}, "environment": {"torch": {"x": "\\ud800"}}}'),
        ("run.json", '{"header": ["\\ud800 <script>"], "environment": {"torch": "\\ud800"}}'),
        ("run.json", "[" * 100_000),
        ("run.json", '{"header": '),
    ],
)
def test_what_a_run_says_of_itself_may_be_anything(tmp_path, capsys, recwarn, file, content):
    folder = write_run(tmp_path / "runs/version_0", [{"val_loss": 1.0}])
    (folder / file).write_text(content)
    page = report(tmp_path / "runs", tmp_path, capsys, recwarn)
    assert "<summary>FedAvg</summary>" in page
    assert " <script>\n" not in page.partition("<pre>")[2]


NAMES = ["$x", "$\\frac{$", "a$b$c", r"\$", "_hidden", "a\nb", "x" * 5000, "</script>", "a|b", "{{data}}", "ü\u2028"]


def test_names_of_metrics_are_shown_as_they_are(tmp_path, capsys, recwarn):
    write_run(tmp_path / "runs/a", [{**dict.fromkeys(NAMES, 1.0)}] * 2)
    write_run(tmp_path / "runs/b$x_$", [{**dict.fromkeys(NAMES, 2.0)}] * 2)
    (tmp_path / "runs/b$x_$/recipe.yaml").unlink()
    page = report(tmp_path / "runs", tmp_path, capsys, recwarn)
    assert page.count("</script>") == (Path(report_package.__file__).parent / "template.html").read_text().count(
        "</script>"
    )
    for name in NAMES[:3]:
        assert main(["plot", str(tmp_path / "runs"), "--metric", name, "--out", str(tmp_path / "x.svg")]) == 0
    picture = (tmp_path / "x.svg").read_text()
    assert "b$x_$" in picture


def test_many_metrics_make_a_picture_of_some(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "_MOST_PANELS", 2)
    write_run(tmp_path / "runs/a", [{f"m{i}": 1.0 for i in range(700)}])
    with pytest.warns(UserWarning, match=r"The picture has 2 of 700 metrics\. Choose one with `--metric`"):
        assert main(["plot", str(tmp_path / "runs"), "--out", str(tmp_path / "x.svg")]) == 0


def test_folders_in_a_circle_and_very_deep_ones(tmp_path):
    write_run(tmp_path / "runs/a/version_0", [{"loss": 1.0}])
    for name in ("x", "y", "z"):
        (tmp_path / f"runs/{name}").symlink_to(tmp_path / "runs", target_is_directory=True)
    before = os.getcwd()
    os.chdir(tmp_path / "runs")
    for _ in range(300):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(before)
    (method,) = load_methods([tmp_path / "runs"])
    assert len(method.runs) == 1


def test_a_mark_names_no_folder_elsewhere(tmp_path, capsys):
    write_run(tmp_path / "secret", [{"loss": 1.0}])
    folder = tmp_path / "runs/M/seed_0"
    write_run(folder / "version_0", [{"loss": 1.0}])
    (folder / "job.yaml").write_text("{}")
    for version in ("../../../secret", str(tmp_path / "secret"), "..", 3, None):
        (folder / "finished.json").write_text(json.dumps({"version": version, "method": ["x"]}))
        assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "x.html")]) == 2
        assert f"`{tmp_path / 'runs'}` holds no run" in lone_sentence(capsys.readouterr().err)


def test_runs_that_cannot_be_told_apart_by_their_settings_are_rows_of_their_own(tmp_path):
    for name, value in (("a", 1), ("b", "1")):
        folder = write_run(tmp_path / name, [{"loss": 1.0}])
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        recipe["model"] = {"x": value}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert len({method.name for method in load_methods([tmp_path])}) == 2


@pytest.mark.filterwarnings("ignore:The `")
@pytest.mark.parametrize("seed", [0, pytest.param(range(1, 40), marks=pytest.mark.slow)])
def test_flipped_bytes_and_files_cut_anywhere(tmp_path, capsys, seed):
    """A page, or an error that names the folder; never anything else."""
    for one in seed if isinstance(seed, range) else [seed]:
        rng = random.Random(one)
        root = tmp_path / str(one)
        rows = [{"loss": 1 / (i + 1), "val_loss": float(i)} for i in range(5)]
        folder = write_run(root / "runs/M/seed_0/version_0", rows)
        (folder.parent / "job.yaml").write_text("{}")
        (folder.parent / "finished.json").write_text('{"version": "version_0"}')
        files = [*folder.iterdir(), folder.parent / "finished.json"]
        for _ in range(12):
            path = rng.choice(files)
            original = path.read_bytes()
            content = bytearray(original[: rng.randrange(len(original) + 1)] if rng.random() < 0.5 else original)
            for _ in range(min(rng.randrange(4), len(content))):
                content[rng.randrange(len(content))] = rng.randrange(256)
            path.write_bytes(content)
            code = main(["report", str(root / "runs"), "--out", str(root / "x.html")])
            errors = capsys.readouterr().err
            assert code == 0 or (code == 2 and str(root / "runs") in lone_sentence(errors)), bytes(content)
            path.write_bytes(original)


@pytest.mark.parametrize("command", ["report", "plot"])
def test_a_page_that_cannot_be_written(tmp_path, capsys, command):
    write_run(tmp_path / "runs", [{"loss": 1.0}])
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    for out in (tmp_path / "file/x.png", tmp_path / "folder.png"):
        assert main([command, str(tmp_path / "runs"), "--out", str(out)]) == 2
        assert f"`{out}` cannot be written: " in lone_sentence(capsys.readouterr().err)


TRICKY = [
    "FedAvg (1)",
    "FedAvg [1]",
    "FedAvg_1_",
    "../../x",
    "..",
    ".",
    "",
    "/etc/x",
    "a/b",
    "a_b",
    "x" * 300,
    "ü" * 200,
]
TRICKY += ["best", "table.md", "report.html", "optuna.journal", ".lock", "a\nb", "a\0b", "~", "a ", "a", "\ud800", "_"]


def test_names_of_presets_are_folders_of_their_own_below_the_one_that_was_asked_for(tmp_path):
    folders = set()
    for name in TRICKY:
        job = seeded_job(tmp_path, name, {"loop": {"seed": 0}, "data": {}}, 0)
        assert job.folder.parent.parent == tmp_path
        assert job.folder.parent.name not in (".", "..", "best", "table.md", "report.html", "optuna.journal", ".lock")
        assert job.folder.resolve() == job.folder
        job.folder.mkdir(parents=True)
        folders.add(job.folder.parent.name)
    assert len(folders) == len(TRICKY)
    assert folder_name("FedDuAdam,model.lr=0.1") == "FedDuAdam,model.lr=0.1"


def test_text_in_the_log_of_a_run_at_work(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text('round,"a,b",word,loss,certificate\n0,1,x,2,ff\n1,3,"y,z",4,ee\n2,')
    assert _last_row(path) == {"round": 1.0, "a,b": 3.0, "loss": 4.0}


def test_yaml_as_it_is_meant(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: &a {x: 1, y: [1, 2.5, null, yes, text]}\nb:\n  <<: *a\n  x: 2\nc: *a\n")
    assert load_yaml(path) == yaml.safe_load(path.read_text())
    path.write_text("")
    assert load_yaml(path) is None
    path.write_text(yaml.safe_dump({"values": list(range(2_000))}))
    assert len(load_yaml(path)["values"]) == 2_000
