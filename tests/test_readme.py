"""What README and docs say is done: their code runs, and so do their commands, on small tasks.

A command that says `# needs …` (GPUs, a cluster, the hub) in its line or block is only parsed, and so is one in
the text.
"""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch

from lightning_feddua import FedAvg, FederatedLoop
from lightning_feddua.cli import commands as cli
from lightning_feddua.cli.actions import ACTIONS, resolve_fit
from lightning_feddua.cli.parsing import new_parser
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.experiments.many_runs import ManyRuns
from lightning_feddua.experiments.sweep import Sweep
from lightning_feddua.models import LinearRegression

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = ["--loop.max_rounds", "1", "--loop.engine", "sequential", "--loop.enable_progress_bar", "false"]
SMALL_SYNTHETIC = ["--loop.local_steps", "1", "--data.dim", "3", "--model.dim", "3"]


def blocks(page):
    return re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL)


COMMAND = re.compile(rf"(?:feddua|-m lightning_feddua) ((?:{'|'.join(cli.COMMANDS)})\b[^>&]*)")
# What the suite itself is started with, and the shell's own.
NOT_OURS = re.compile(r"pip install |pytest|wait$")


def commands(block):
    """Arguments of each command in a block of bash, and whether it can run anywhere."""
    everywhere = not re.search(r"^# needs ", block, re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines():
        line, _, comment = line.partition("#")
        found = COMMAND.findall(line)
        assert found or not line.strip() or NOT_OURS.match(line), f"`{line}` is not tried by any test."
        for arguments in found:
            yield shlex.split(arguments), everywhere and not comment.strip().startswith("needs ")


def commands_in_the_text(page):
    """Those between backticks, with words in capitals for what is the reader's; some are cut short by an ellipsis."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for command in re.findall(r"`(feddua [^`]*--[^`]*)`", text):
        if "…" not in command:
            arguments = COMMAND.fullmatch(" ".join(command.split()))
            assert arguments, command
            yield shlex.split(arguments[1].replace("NAME", "FedExP").replace("SEED", "3"))


def write_file(folder, block):
    """Save a block that begins with its name."""
    if match := re.match(r"# (\w+\.(?:py|yaml))\n", block):
        (folder / match[1]).write_text(block)


def run(arguments):
    if "optuna" in arguments and importlib.util.find_spec("optuna") is None:
        return
    small = [*SMALL, *(SMALL_SYNTHETIC if "synthetic" in " ".join(arguments) else [])]
    if "--loop.devices" in arguments:
        small += ["--loop.strategy", "ddp_fork"]
    if arguments[0] in ("compare", "sweep"):
        small += ["--seeds", "1", *([] if "--methods" in arguments else ["--methods", "FedAvg", "FedDuAdam"])]
        arguments = [re.sub(r"(=log:.*):5$", r"\1:2", argument) for argument in arguments]
    print_config = "--print_config" in arguments
    try:
        code = cli.main([*arguments, *(small if arguments[0] in ("fit", "compare", "sweep") else [])])
    except SystemExit as stop:
        assert print_config
        code = stop.code
    assert code == 0, arguments


def parse(arguments):
    command = ACTIONS[arguments[0]]
    parser = new_parser()
    command.add_arguments(parser)
    config = parser.parse_args(command.prepare(arguments[1:]))
    if arguments[0] in ("compare", "sweep"):
        # Every preset is parsed in another test.
        asked = (ManyRuns if arguments[0] == "compare" else Sweep)(**vars(config))
        resolve_fit(next(iter(asked.method_arguments().values())))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


_LONG = [page if page.stem == "README" else pytest.param(page, marks=pytest.mark.slow) for page in PAGES]


@pytest.mark.parametrize("page", _LONG, ids=lambda page: page.stem)
def test_commands_of_a_page_run(page, folder, capsys):
    count = 0
    for language, block in blocks(page):
        write_file(folder, block)
        for arguments, everywhere in commands(block) if language == "bash" else []:
            (run if everywhere else parse)(arguments)
            count += 1
    assert count
    # They may name what the others have made.
    for arguments in commands_in_the_text(page):
        parse(arguments)
    if page.stem == "compare_tune_watch":
        for result in ("curves.pdf", "report.html", "runs/synthetic/sweep/best/FedAvg.yaml"):
            assert (folder / result).is_file()


def run_python(stem):
    """What a page's examples, one after another, have defined."""
    scope = {"__name__": "page"}
    for language, block in blocks(next(page for page in PAGES if page.stem == stem)):
        if language == "python":
            exec(block, scope)  # the documentation is the code under test
    return scope


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_of_a_page_runs(page, folder):
    run_python(page.stem)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_has_an_example_that_is_right(name, folder, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    if name == "verify":
        # What it looks at is a run.
        assert cli.main(["fit", "--config", "synthetic", "--loop.max_rounds", "1"]) == 0
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    (example,) = re.findall(r"^Example: (feddua .*)$", capsys.readouterr().out, re.MULTILINE)
    ((arguments, _),) = commands(example)
    assert arguments[0] == name
    parse(arguments)


def test_the_first_example_is_short():
    example = next(block for language, block in blocks(PAGES[0]) if language == "python")
    assert len([line for line in example.splitlines() if line]) <= 10


def test_the_readme_is_read_in_five_minutes():
    assert len(PAGES[0].read_text().splitlines()) <= 240


def fit_linear(model, **arguments):
    loop = FederatedLoop(**arguments, max_rounds=1, local_steps=2, engine="sequential", precision="64-true")
    loop.fit(model, SyntheticRegression(dim=6, num_clients=3))
    return loop


def test_the_server_rule_does_what_it_says(folder):
    model = LinearRegression(dim=6)
    loop = fit_linear(model, server=run_python("server_rule")["FedSign"](0.5))
    # The model starts from zero.
    assert loop.weights.abs().tolist() == [0.5] * 6


def test_the_client_algorithm_does_what_it_says(folder):
    model = LinearRegression(dim=6)
    loop = fit_linear(model, server=FedAvg(), client=run_python("client_algorithm")["FedDyn"](alpha=0.3))
    h = torch.stack([loop.states.get(i)[0] for i in range(len(loop.states))]).mean(0)
    assert loop.weights.abs().min() > 0
    torch.testing.assert_close(h, -0.3 * loop.weights)


def test_the_mirror_map_is_one(folder):
    cosh = run_python("mirror_map")["Cosh"]()
    w = torch.linspace(-3, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(cosh.grad_phi(cosh.grad_psi(w)), w)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for path, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([\w-]+))?\)", page.read_text()):
            target = (page.parent / path) if path else page
            assert target.exists(), (page.name, path)
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
