"""Fabric's objects in place of names: accelerators, strategies and precision plugins."""

from datetime import timedelta

import pytest
import torch
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.plugins import DoublePrecision, MixedPrecision, Precision
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

from lightning_feddua import ConfigurationError, FedAvg
from lightning_feddua._private import process_group_timeout
from lightning_feddua.launch.fabric import precision_name
from tests.modules import Classifier


class Rounded(Precision):
    """A user's own."""

    precision = "32-true"


def fitted(make_loop, clients, path=None, **arguments):
    torch.manual_seed(0)
    model = Classifier()
    loop = make_loop(**{"server": FedAvg(), "engine": "sequential", "checkpoint_every": 1, **arguments})
    loop.fit(model, clients, path)
    return model.state_dict(), loop


def same(one, other):
    return all(torch.equal(one[name], value) for name, value in other.items())


@pytest.mark.parametrize(
    ("objects", "names"),
    [
        ({"accelerator": CPUAccelerator()}, {}),
        ({"strategy": SingleDeviceStrategy(torch.device("cpu"))}, {}),
        ({"strategy": DDPStrategy(start_method="fork"), "devices": 2}, {"strategy": "ddp_fork", "devices": 2}),
        ({"precision": DoublePrecision()}, {"precision": "64-true"}),
        ({"precision": MixedPrecision("bf16-mixed", "cpu")}, {"precision": "bf16-mixed"}),
        ({"precision": Rounded()}, {}),
    ],
)
def test_an_object_does_what_its_name_does(make_loop, clients, objects, names):
    assert same(fitted(make_loop, clients, **names)[0], fitted(make_loop, clients, **objects)[0])


def test_a_run_is_resumed_with_the_object_or_its_name(make_loop, clients):
    plugin = MixedPrecision("bf16-mixed", "cpu")
    whole, _ = fitted(make_loop, clients, max_rounds=2, precision="bf16-mixed")
    _, first = fitted(make_loop, clients, max_rounds=1, precision=plugin)
    path = first.run_dir / "last.ckpt"
    resumed, _ = fitted(make_loop, clients, path, max_rounds=2, precision="bf16-mixed", strategy=SingleDeviceStrategy())
    assert same(whole, resumed)
    with pytest.raises(ConfigurationError, match=r"`precision` was `bf16-mixed` and is `32-true Rounded`"):
        fitted(make_loop, clients, path, max_rounds=2, precision=Rounded())


def test_the_description_of_a_scaler(make_loop):
    names = []
    for interval in (2000, 10):
        plugin = MixedPrecision("bf16-mixed", "cpu")
        plugin.scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
        names.append(precision_name(make_loop(precision=plugin).fabric))
    assert names == ["bf16-mixed", "bf16-mixed growth_interval 10"]


def test_a_strategys_own_timeout_counts_unless_another_is_given(make_loop):
    def timeout(**arguments):
        return process_group_timeout(make_loop(devices=2, **arguments).fabric.strategy)

    ten = timedelta(seconds=10)
    assert timeout(strategy=DDPStrategy(start_method="fork", timeout=ten)) == ten
    assert timeout(strategy=DDPStrategy(start_method="fork", timeout=ten), timeout=20.0) == timedelta(seconds=20)
    assert timeout(strategy="ddp_fork", timeout=20.0) == timedelta(seconds=20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"strategy": FSDPStrategy(), "devices": 2},
            r"(Fabric cannot start with .*FSDPStrategy\(\)|splits one model).*\. ",
        ),
        ({"strategy": DDPStrategy(start_method="spawn"), "devices": 2}, r"DDPStrategy\(\) starts processes .*\. Use"),
        ({"accelerator": object()}, r"Fabric does not take the accelerator `builtins\.object`\. Give Fabric's"),
        ({"strategy": 3}, r"Fabric cannot start with .*strategy=3.*\. Change"),
    ],
)
def test_objects_that_do_not_fit(make_loop, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        make_loop(**arguments)
