"""The README's code runs, and its commands are understood."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from lightning_feddua import FedAvg
from lightning_feddua.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = list(
    dict.fromkeys(
        match[1].split("#")[0].strip()
        for language, block in BLOCKS
        if language == "bash"
        for match in re.finditer(r"(?:feddua|-m lightning_feddua) ((?:fit|data|compare|plot|report) .*)", block)
    )
)
# These run for real, one after another, on a small task.
ON_RUNS = [command for command in COMMANDS if command.split()[0] in ("compare", "plot", "report")]


def test_python_examples_run_one_after_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    examples = [block for language, block in BLOCKS if language == "python"]
    assert len(examples) == 7
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


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ON_RUNS])
def test_commands_are_understood(command, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parent.parent)
    arguments = shlex.split(command)
    with pytest.raises(SystemExit) as stop:
        main([*arguments, *([] if "--print_config" in arguments else ["--print_config"])])
    assert stop.value.code == 0


def test_commands_about_runs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--loop.max_rounds", "1", "--loop.local_steps", "1", "--data.dim", "3", "--model.dim", "3"]
    small += ["--loop.engine", "sequential"]
    for command in ON_RUNS:
        assert main([*shlex.split(command), *(small if command.startswith("compare") else [])]) == 0, command
    assert (tmp_path / "curves.pdf").is_file()
    assert (tmp_path / "report.html").is_file()


def test_there_are_commands():
    assert len(COMMANDS) - len(ON_RUNS) >= 5
    assert len(ON_RUNS) >= 4
