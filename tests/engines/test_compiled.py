import pytest
import torch
import torch._inductor
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.utils.data import TensorDataset

from lightning_feddua import FedAdam, FederatedDataModule, FederatedLoop, FedProx, LocalTraining, Scaffold
from lightning_feddua.models import FemnistCNN, LinearRegression
from tests.modules import Classifier, classification


class Plain(Classifier):
    """With BatchNorm, and an optimizer that every algorithm can work with."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, weight_decay=0.01)


class Scheduled(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "interval": "step"}]


def fit(make, data, tmp_path, compile, **arguments):
    torch.manual_seed(0)
    module = make()
    loop = FederatedLoop(
        server=FedAdam(),
        engine="vectorized",
        compile=compile,
        accelerator="cpu",
        out_dir=tmp_path,
        enable_progress_bar=False,
        **{"max_rounds": 5, "local_steps": 3, "local_lr_decay": 0.9, **arguments},
    )
    loop.fit(module, data)
    return torch.cat([value.double().flatten() for value in module.state_dict().values()]), loop.history


def points(sizes=(12, 12, 12)):
    return FederatedDataModule({str(i): classification(n, seed=i) for i, n in enumerate(sizes)}, batch_size=5)


def regression():
    return FederatedDataModule(
        {str(i): TensorDataset(torch.randn(8, 5).double(), torch.randn(8, 1).double()) for i in range(3)}, batch_size=8
    )


def images():
    return FederatedDataModule(
        {str(i): TensorDataset(torch.rand(6, 1, 28, 28), torch.randint(62, (6,))) for i in range(2)}, batch_size=4
    )


def cnn():
    module = FemnistCNN(lr=0.05)
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return module


CASES = {
    "linear": (lambda: LinearRegression(5), regression, {"precision": "64-true", "gradient_clip_val": 1.0}, 1e-10),
    "adam": (lambda: Classifier(dropout=0.0), lambda: points((12, 14, 9)), {"local_steps": 2}, 1e-5),
    "scaffold": (lambda: Plain(0.0), points, {"client": Scaffold, "local_steps": 2}, 1e-5),
    # FedAdam divides by what is nearly zero in its first rounds, and float32 would show it.
    "cnn": (cnn, images, {"precision": "64-true", "max_rounds": 2, "local_steps": 2, "gradient_clip_val": 10.0}, 1e-8),
}


# The compiler takes 10 to 25 seconds for each of the others.
@pytest.mark.parametrize("case", [c if c == "linear" else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_compiled_equals_eager(case, tmp_path, recwarn):
    make, data, arguments, tolerance = CASES[case]
    results = []
    for compile in (False, True):
        torch.manual_seed(0)
        own = {name: value() if name == "client" else value for name, value in arguments.items()}
        results.append(fit(make, data(), tmp_path, compile, **own))
    assert not [w for w in recwarn if "compiled" in str(w.message)]
    (eager, eager_history), (compiled, compiled_history) = results
    assert torch.linalg.norm(compiled - eager) <= tolerance * torch.linalg.norm(eager)
    assert not torch.equal(eager, compiled)
    for a, b in zip(eager_history, compiled_history, strict=True):
        assert a.keys() == b.keys()
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def wrong_compiler(graph, examples, **_):
    """Makes what torch once made of a convolution: gradients of the wrong size."""

    def function(*tensors):
        before = tensors[0].clone()
        outputs = graph(*tensors)
        tensors[0].lerp_(before, 0.5)
        return outputs

    return function


def no_compiler(graph, examples, **_):
    raise RuntimeError("no C++ compiler found")


class Secret(FedProx):
    """Keeps a tensor where nobody looks for it."""

    def __init__(self):
        super().__init__()
        self.hidden = torch.zeros(3)


@pytest.mark.parametrize(
    ("make", "client", "compiler", "reason"),
    [
        (lambda: Plain(0.0), LocalTraining(), wrong_compiler, "differ from the eager ones by 5.0e-01"),
        (lambda: Plain(0.0), LocalTraining(), no_compiler, "no C\\+\\+ compiler found"),
        (lambda: Scheduled(0.0), LocalTraining(), None, "a scheduler changes learning rates"),
        (lambda: Plain(0.0), Secret(), None, "`Secret` keeps tensors outside"),
    ],
)
def test_what_cannot_be_compiled_is_trained_eagerly_with_one_warning(
    make, client, compiler, reason, tmp_path, monkeypatch
):
    expected, _ = fit(make, points(), tmp_path, False, client=client)
    if compiler is not None:
        monkeypatch.setattr(torch._inductor, "compile", compiler)
    with pytest.warns(UserWarning, match=reason) as warnings:
        found, _ = fit(make, points(), tmp_path, True, client=client)
    assert len([w for w in warnings if "not compiled" in str(w.message)]) == 1
    assert torch.equal(found, expected)


def test_a_second_run_finds_the_compiled_steps_on_disk(tmp_path):
    with fresh_cache():
        for count in ({"fxgraph_cache_miss": 1}, {"fxgraph_cache_hit": 1}):
            counters.clear()
            fit(lambda: LinearRegression(dim=5, lr=0.1).double(), regression(), tmp_path, compile=True)
            found = {name: n for name, n in counters["inductor"].items() if name.startswith("fxgraph_cache")}
            assert found == count


def test_random_steps_are_not_compiled(tmp_path, monkeypatch):
    # The traced graph draws as the eager steps do, but for the random numbers of another order.
    def other_numbers(graph, examples, **_):
        def function(*tensors):
            torch.rand(1)
            return graph(*tensors)

        return function

    monkeypatch.setattr(torch._inductor, "compile", other_numbers)
    expected, _ = fit(lambda: Plain(0.5), points(), tmp_path, False)
    with pytest.warns(UserWarning, match="draw random numbers"):
        found, _ = fit(lambda: Plain(0.5), points(), tmp_path, True)
    assert torch.equal(found, expected)
