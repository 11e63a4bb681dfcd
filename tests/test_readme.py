"""What README and docs say is done: their code runs, and so do their commands, on small tasks.

A command that says `# needs …` (GPUs, a cluster, the hub) in its line or block is only parsed.
"""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch

from lightning_feddua import FedAvg, cli
from lightning_feddua.comparison import method_arguments

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = ["--loop.max_rounds", "1", "--loop.engine", "sequential", "--loop.enable_progress_bar", "false"]
SMALL_SYNTHETIC = ["--loop.local_steps", "1", "--data.dim", "3", "--model.dim", "3"]


def blocks(page):
    return re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL)


def commands(block):
    """Arguments of each command in a block of bash, and whether it can run anywhere."""
    everywhere = not re.search(r"^# needs ", block, re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines():
        line, _, comment = line.partition("#")
        match = re.search(rf"(?:feddua|-m lightning_feddua) ((?:{'|'.join(cli.COMMANDS)}) [^>&]*)", line)
        if match:
            yield shlex.split(match[1]), everywhere and not comment.strip().startswith("needs ")


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
    command = cli.COMMANDS[arguments[0]]
    parser = cli._parser()
    command.add_arguments(parser)
    config = parser.parse_args(command.prepare(arguments[1:]))
    if arguments[0] in ("compare", "sweep"):
        # Every preset is parsed in another test.
        cli._resolve_fit(next(iter(method_arguments(config.config, config.methods, config.overrides).values())))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_run(page, folder, monkeypatch, capsys):
    count = 0
    for language, block in blocks(page):
        write_file(folder, block)
        for arguments, everywhere in commands(block) if language == "bash" else []:
            (run if everywhere else parse)(arguments)
            count += 1
    assert count >= 3
    if page.stem == "README":
        for result in ("curves.pdf", "report.html", "runs/synthetic/sweep/best/FedAvg.yaml"):
            assert (folder / result).is_file()


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_python_of_a_page_runs(page, folder):
    scope = {"__name__": "page"}
    for language, block in blocks(page):
        if language == "python":
            exec(block, scope)  # the documentation is the code under test


def test_python_examples_run_one_after_another(folder, capsys):
    examples = [block for language, block in blocks(PAGES[0]) if language == "python"]
    assert len(examples) == 8
    scope = {}
    for example in examples:
        exec(example, scope)  # the documentation is the code under test
    for example in (examples[0], examples[2]):
        assert len([line for line in example.splitlines() if line]) <= 10

    loop = type(scope["loop"])(server=scope["FedSign"](0.5), max_rounds=1, local_steps=1)
    model = scope["Net"]()
    before = model.head.bias.detach().clone()
    loop.fit(model, scope["data"])
    assert ((model.head.bias - before).abs() - 0.5).abs().max() < 1e-6
    loop = type(scope["loop"])(
        server=FedAvg(), client=scope["FedDyn"](alpha=0.3), max_rounds=1, local_steps=2, engine="sequential"
    )
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    loop.fit(model, scope["data"])
    h = torch.stack([loop.states.get(i)[0] for i in range(len(loop.states))]).mean(0)
    torch.testing.assert_close(h, -0.3 * (loop.weights - before), rtol=1e-4, atol=1e-6)
    w = torch.linspace(-3, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(scope["Cosh"]().grad_phi(scope["Cosh"]().grad_psi(w)), w)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for path, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([\w-]+))?\)", page.read_text()):
            target = (page.parent / path) if path else page
            assert target.exists(), (page.name, path)
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
