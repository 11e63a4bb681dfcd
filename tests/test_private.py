"""Canaries: each private name of another package still exists and still does what this package relies on."""

import ast
import logging
import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import datasets
import jsonargparse
import pytest
import torch
from lightning import LightningDataModule, LightningModule
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.demos.boring_classes import BoringModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._inductor.utils import fresh_cache
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lightning_feddua
from lightning_feddua import _private

PACKAGE = Path(lightning_feddua.__file__).parent


def test_pytree_goes_through_lists_and_dicts_in_order():
    tree = {"b": [1, 2], "a": (3, None)}
    leaves, spec = _private.tree_flatten(tree)
    assert leaves == _private.tree_leaves(tree) == [1, 2, 3, None]
    assert _private.tree_unflatten(leaves, spec) == tree
    assert _private.tree_map_only(int, str, tree) == {"b": ["1", "2"], "a": ("3", None)}
    assert _private.tree_map(str, tree) == {"b": ["1", "2"], "a": ("3", "None")}
    # Structures with the same keys are told apart by their text.
    assert str(spec) == str(_private.tree_flatten(tree)[1]) != str(_private.tree_flatten({"b": [1], "a": (3, None)})[1])


def test_many_tensors_are_zeroed_added_and_copied_in_place():
    tensors = [torch.ones(2), torch.ones(3, dtype=torch.float64)]
    _private.copy_all(tensors, [torch.full((2,), 5.0, dtype=torch.float64), torch.full((3,), 6.0)])
    assert [t.tolist() for t in tensors] == [[5.0] * 2, [6.0] * 3]
    _private.add_all(tensors, [torch.ones(2), torch.ones(3, dtype=torch.float64)])
    assert [t.tolist() for t in tensors] == [[6.0] * 2, [7.0] * 3]
    _private.zero_all(tensors)
    assert [t.tolist() for t in tensors] == [[0.0] * 2, [0.0] * 3]


def test_a_version_grows_with_changes_in_place_through_views():
    tensor = torch.zeros(4)
    before = _private.version_of(tensor)
    tensor.sum()
    assert _private.version_of(tensor) == before
    tensor[:2].add_(1)
    assert _private.version_of(tensor) > before


def test_a_state_dict_has_metadata():
    state_dict = torch.nn.BatchNorm1d(2).state_dict()
    assert _private.metadata_of(state_dict)[""]["version"] == 2
    copy = type(state_dict)(state_dict)
    _private.set_metadata(copy, _private.metadata_of(state_dict))
    assert _private.metadata_of(copy) == _private.metadata_of(state_dict)
    assert _private.metadata_of({}) is None


def test_a_module_has_these_registries():
    module = torch.nn.BatchNorm1d(2)
    assert {"weight", "running_mean"} <= {name for kind in _private.MODULE_REGISTRIES for name in vars(module)[kind]}
    assert all(kind in vars(module) for kind in _private.MODULE_REGISTRIES)


def test_a_scheduler_has_these_keys():
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.5)
    step = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert step.state_dict()[_private.SCHEDULER_LAST_RATES] == [0.5]
    chained = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [step, torch.optim.lr_scheduler.StepLR(optimizer, 1)], [1]
    )
    children = chained.state_dict()[_private.SCHEDULER_CHILDREN]
    assert [_private.SCHEDULER_LAST_RATES in child for child in children] == [True, True]


def test_vmap_says_that_it_does_not_know_an_operation():
    lstm = torch.nn.LSTM(2, 2)
    with pytest.raises(RuntimeError, match=_private.NO_BATCHING_RULE):
        torch.vmap(lambda x: lstm(x)[0])(torch.zeros(3, 4, 2))


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_the_process_group_has_a_store():
    store = _private.default_store()
    assert not store.check(["canary"])
    store.set("canary", "7")
    assert store.check(["canary"])
    assert store.get("canary") == b"7"


def test_a_traced_function_is_compiled_and_cached():
    constant = torch.full((3,), 2.0)

    def function(x, y):
        y.mul_(constant)
        return [x @ y, x.sum(0)]

    inputs = [torch.randn(4, 3), torch.randn(3)]
    options = {**_private.EAGER_RANDOM_NUMBERS, **_private.threads_option(1)}
    with fresh_cache(), _private.compile_session():
        graph = _private.trace(function, inputs)
        assert isinstance(graph, torch.fx.GraphModule)
        compiled = _private.compile_graph(graph, inputs, options)
        own, expected = ([x.clone() for x in inputs] for _ in range(2))
        torch.testing.assert_close(list(compiled(*own)), function(*expected))
        torch.testing.assert_close(own, expected)
        assert list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("fxgraph/**/*")), (
            "nothing is in the cache on disk"
        )


def test_random_numbers_of_compiled_code_are_those_of_eager_code():
    def function(x):
        return [torch.dropout(x, 0.5, True)]

    x = torch.ones(1000)
    with _private.compile_session():
        compiled = _private.compile_graph(_private.trace(function, [x]), [x], _private.EAGER_RANDOM_NUMBERS)
    results = []
    for run in (function, compiled):
        torch.manual_seed(0)
        results.append(run(x)[0])
    assert torch.equal(*results)


def test_the_compiler_takes_an_option_to_read_what_is_stored():
    def function(x):
        return x.add_(1).square().sum()

    compiled = torch.compile(function, dynamic=True, options=_private.STORED_VALUES_ARE_READ)
    assert compiled(torch.ones(1000)).item() == 4000
    with pytest.raises(RuntimeError, match="no_such_option"):
        torch.compile(function, options={"no_such_option": 1})


def test_the_compiler_logs_under_this_name():
    import torch._inductor.graph

    logger = torch._inductor.graph.log
    assert logger.name.startswith(_private.COMPILER_LOGGER)
    parent = logging.getLogger(_private.COMPILER_LOGGER)
    before = parent.level
    parent.setLevel(logging.ERROR)
    try:
        assert logger.level == logging.NOTSET
        assert logger.getEffectiveLevel() == logging.ERROR
    finally:
        parent.setLevel(before)


def test_the_compiler_is_not_imported_before_it_is_used():
    script = "import sys, lightning_feddua._private; print('torch._inductor.compile_fx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "starts", "method"), [("ddp_fork", True, "fork"), ("ddp", False, "popen"), ("auto", False, None)]
)
def test_how_strategies_start_processes(name, starts, method):
    strategy = Fabric(accelerator="cpu", strategy=name, devices=1 if name == "auto" else 2).strategy
    assert _private.starts_processes(strategy) is starts
    assert _private.start_method(strategy) == method


def test_spawning_strategies_are_told_apart():
    strategy = Fabric(accelerator="cpu", strategy="ddp_spawn", devices=2).strategy
    assert _private.start_method(strategy) == "spawn"


def test_the_timeout_of_a_strategy_reaches_its_process_group(monkeypatch):
    environment = LightningEnvironment()
    strategy = DDPStrategy(CPUAccelerator(), [torch.device("cpu")], environment)
    assert isinstance(_private.process_group_timeout(strategy), timedelta)
    assert _private.process_group_timeout(SingleDeviceStrategy()) is None
    _private.set_process_group_timeout(strategy, timedelta(seconds=7))
    assert _private.process_group_backend(strategy) == "gloo"
    found = {}
    monkeypatch.setattr("lightning.fabric.strategies.ddp._init_dist_connection", lambda *a, **k: found.update(k))
    strategy.setup_environment()
    assert found["timeout"] == timedelta(seconds=7)


def test_the_trainer_of_a_module_can_be_asked_for_when_there_is_none():
    module = BoringModel()
    assert _private.trainer_of(module) is None
    with pytest.raises(RuntimeError, match="not attached"):
        module.trainer  # noqa: B018
    module.trainer = trainer = type("View", (), {})()
    assert _private.trainer_of(module) is trainer
    assert _private.trainer_of(LightningDataModule()) is None


def test_what_a_module_asks_its_trainer_for():
    asked = []

    class View:
        barebones = False
        loggers = ()

        def __getattr__(self, name):
            asked.append(name)
            raise RuntimeError(name)

    class Strategy:
        pass

    module = BoringModel()
    module.trainer = View()
    with pytest.raises(RuntimeError, match=_private.TRAINER_RESULTS):
        module.log("x", 1.0)
    assert asked[-1] == _private.TRAINER_RESULTS
    View.strategy = Strategy()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    setattr(Strategy, _private.STRATEGY_OPTIMIZERS, [optimizer])
    assert module.optimizers() is optimizer


class Hparams(LightningModule):
    def __init__(self, settings):
        super().__init__()
        self.save_hyperparameters(settings)


def test_the_name_of_hyperparameters():
    assert _private.hparams_name(Hparams({"a": 1})) == "settings"
    assert _private.hparams_name(BoringModel()) is None


def test_optimizers_and_schedulers_are_parsed():
    module = BoringModel()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    config = {"scheduler": scheduler, "interval": "step", "frequency": 3}
    optimizers, schedulers, monitor = _private.parse_optimizers({"optimizer": optimizer, "lr_scheduler": config})
    assert optimizers == [optimizer]
    assert monitor is None
    (parsed,) = _private.parse_schedulers(schedulers, monitor, module)
    assert (parsed.scheduler, parsed.interval, parsed.frequency) == (scheduler, "step", 3)
    assert _private.parse_optimizers([optimizer]) == ([optimizer], [], None)
    module.automatic_optimization = False
    (parsed,) = _private.parse_schedulers([scheduler], None, module)
    assert parsed.scheduler is scheduler


def test_a_scheduler_of_unknown_kind_is_refused():
    with pytest.raises(Exception, match="`object` is invalid"):
        _private.parse_schedulers([{"scheduler": object()}], None, BoringModel())


def test_a_wrapped_optimizer_steps_through_the_strategy():
    class Strategy:
        def optimizer_step(self, optimizer, closure, **kwargs):
            return optimizer, closure()

    optimizer, strategy = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1), Strategy()
    wrapped = _private.wrap_optimizer(optimizer, strategy)
    assert isinstance(wrapped, torch.optim.SGD)
    assert wrapped.step(lambda: 5) == (optimizer, 5)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_logger_writes_to_the_version_that_is_set(kind, tmp_path):
    kind(tmp_path).log_metrics({"a": 1.0}, step=0)
    logger = kind(tmp_path)
    assert _private.version_is_open(logger)
    _private.set_version(logger, 5)
    assert not _private.version_is_open(logger)
    assert logger.version == 5
    assert not _private.is_opened(logger)
    logger.log_metrics({"a": 1.0}, step=0)
    assert _private.is_opened(logger)
    assert Path(logger.log_dir).name == "version_5"


def test_a_csv_logger_starts_again(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    logger.log_metrics({"a": 1.0}, step=0)
    _private.reopen(logger)
    with pytest.warns(UserWarning, match="exists and is not empty"):
        logger.log_metrics({"a": 2.0}, step=0)
    assert (Path(logger.log_dir) / "metrics.csv").read_text().split() == ["a,step", "2.0,0"]


def test_tensorboard_forgets_from_a_step_on(tmp_path):
    first = TensorBoardLogger(tmp_path, version=0)
    for step in range(5):
        first.log_metrics({"a": 1.0}, step=step)
    first.finalize("success")
    second = TensorBoardLogger(tmp_path, version=0)
    _private.set_purge_step(second, 3)
    second.log_metrics({"a": 2.0}, step=3)
    second.finalize("success")
    events = EventAccumulator(str(second.log_dir)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]


@pytest.mark.usefixtures("process_group")
def test_a_metric_does_not_exchange_its_state_if_told_so(monkeypatch):
    metric = MeanMetric(distributed_available_fn=lambda: True)
    synced = []
    monkeypatch.setattr(metric, "_sync_dist", lambda *a, **k: synced.append(True))
    metric.update(1.0)
    flags = _private.sync_flags(metric)
    assert flags == (True, True)
    _private.set_sync_flags(metric, (False, False))
    assert metric.compute() == 1.0
    metric(2.0)
    assert not synced
    _private.set_sync_flags(metric, flags)
    metric.compute()
    assert synced


def test_the_options_of_a_parser():
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--number", type=int)
    assert {"--help", "--number"} <= set(_private.options_of(parser))


def test_the_action_of_an_option():
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=3)
    assert _private.action_of(parser, "number").default == 3


def test_the_workers_of_a_loader_are_ended():
    loader = DataLoader([1, 2, 3], batch_size=None, num_workers=1, persistent_workers=True)
    _private.end_workers(loader)
    before = set(multiprocessing.active_children())
    next(iter(loader))
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 1
    _private.end_workers(loader)
    assert not any(process.is_alive() for process in started)


def test_a_selection_of_rows_has_indices():
    whole = datasets.Dataset.from_dict({"label": [0, 1, 2]})
    assert not _private.has_indices(whole)
    chosen = whole.select([2, 0])
    assert _private.has_indices(chosen)
    assert len(chosen.data) == 3
    assert not _private.has_indices(chosen.flatten_indices())


def test_the_tracer_has_a_logger_of_its_own():
    from torch._subclasses import fake_tensor

    assert fake_tensor.log.name == _private.TRACER_LOGGER


def test_every_name_has_a_canary():
    own = ast.parse((PACKAGE / "_private.py").read_text())
    names = {node.name for node in own.body if isinstance(node, ast.FunctionDef)} | set(_private.__all__)
    names |= {name for name in vars(_private) if name.isupper()}
    tests = ast.parse(Path(__file__).read_text())
    used = {node.attr for node in ast.walk(tests) if isinstance(node, ast.Attribute)}
    assert len(names) > 30
    assert names <= used


def private_names(path):
    """Private names in a file: attributes, keywords, and what is imported from other packages."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_feddua"):
            names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_no_other_file_reaches_for_private_names():
    known = private_names(PACKAGE / "_private.py")
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py") if path.name != "_private.py"}
    # What a module's base classes call is defined under their names.
    allowed = {"host/trainer_view.py": {_private.STRATEGY_OPTIMIZERS}}
    found = {name: private_names(path) & known - allowed.get(name, set()) for name, path in files.items()}
    assert {name: names for name, names in found.items() if names} == {}
