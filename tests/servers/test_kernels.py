"""A server step that cannot be compiled, or is compiled wrong, runs eagerly and says so once."""

import pytest
import torch

from lightning_feddua import FedDuAdam, RoundUpdate


def steps(server, rounds=3):
    generator = torch.Generator().manual_seed(0)
    weights = torch.zeros(40)
    for _ in range(rounds):
        deltas = torch.randn(5, 40, generator=generator)
        server.step(weights, RoundUpdate(deltas.mean(0), deltas.square().sum(1)))
    return weights


def no_compiler(function, **_):
    def compiled(*args):
        raise RuntimeError("no C++ compiler found.")

    return compiled


def wrong_compiler(function, **_):
    def compiled(*args):
        result = function(*args)
        args[0].mul_(1.01)
        return result

    return compiled


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (no_compiler, r"no C\+\+ compiler found\."),
        (wrong_compiler, "the compiled one computes something else"),
    ],
)
def test_the_step_runs_eagerly_with_one_warning(compiler, reason, monkeypatch):
    expected = steps(FedDuAdam())
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr("lightning_feddua.servers.passes.COMPILED_SERVER_SIZE", 10)
    server = FedDuAdam()
    server.set_up(layout=None, compile=True)
    with pytest.warns(UserWarning, match=rf"^The server step runs eagerly and is not compiled: {reason}") as warnings:
        found = steps(server)
    assert len(warnings) == 1
    assert torch.equal(found, expected)
    assert not server._passes.compiled
