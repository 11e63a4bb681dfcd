"""Compiled passes that fail, or compute something else, are not used, and one warning says why."""

import pytest
import torch

from lightning_feddua.servers.kernels import ServerKernels


def moments(delta, v, s, s_correction):
    v.lerp_(delta, 0.1)
    s.addcmul_(delta, delta)
    return v.double().square().sum()


def move(w, v, s, scale, s_correction):
    w.add_(v / (s.sqrt() * s_correction + 1e-3) * scale)


def right_compiler(function, **_):
    return function


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
        (right_compiler, None),
        (no_compiler, "no C++ compiler found."),
        (wrong_compiler, "the compiled one computes something else, which differs by"),
    ],
)
def test_compiled_passes_are_used_only_if_they_agree(compiler, reason, monkeypatch, recwarn):
    monkeypatch.setattr(torch, "compile", compiler)
    vectors = [torch.randn(40), torch.randn(40), torch.zeros(40), torch.ones(40)]
    before = [vector.clone() for vector in vectors]
    assert ServerKernels(moments, move).compile(*vectors) is (reason is None)
    assert all(map(torch.equal, vectors, before))
    expected = [] if reason is None else [f"The server step runs eagerly and is not compiled: {reason}"]
    assert len(recwarn) == len(expected)
    assert all(str(w.message).startswith(message) for w, message in zip(recwarn, expected, strict=True))
