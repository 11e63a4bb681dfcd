"""Canaries of the private names of torch."""

import logging
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import fresh_cache
from torch.utils.data import DataLoader, Dataset

from lightning_feddua import _private


def test_pytree_goes_through_lists_and_dicts_in_order():
    tree = {"b": [1, 2], "a": (3, None)}
    leaves, spec = _private.tree_flatten(tree)
    assert leaves == _private.tree_leaves(tree) == [1, 2, 3, None]
    assert _private.tree_unflatten(leaves, spec) == tree
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


def test_hooks_before_a_forward_pass_name_the_attribute_that_they_compute():
    layer = torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2))
    assert _private.recomputed_attributes(layer) == ["weight"]
    assert isinstance(vars(layer)["weight"], torch.Tensor)
    assert _private.recomputed_attributes(torch.nn.Linear(2, 2)) == []


def test_a_state_dict_has_metadata():
    state_dict = torch.nn.BatchNorm1d(2).state_dict()
    assert _private.metadata_of(state_dict)[""]["version"] == 2
    copy = type(state_dict)(state_dict)
    _private.set_metadata(copy, _private.metadata_of(state_dict))
    assert _private.metadata_of(copy) == _private.metadata_of(state_dict)
    assert _private.metadata_of({}) is None
    # As OmegaConf's dictionaries have one.
    copy._metadata = object()
    assert _private.metadata_of(copy) is None


def test_a_module_has_these_registries():
    module = torch.nn.BatchNorm1d(2)
    assert {"weight", "running_mean"} <= {name for kind in _private.MODULE_REGISTRIES for name in vars(module)[kind]}
    assert all(kind in vars(module) for kind in _private.MODULE_REGISTRIES)
    assert list(vars(module)[_private.PARAMETERS]) == ["weight", "bias"]
    assert "running_mean" in vars(module)[_private.BUFFERS]
    assert vars(module)[_private.SUBMODULES] == {}


def test_vmap_says_that_it_does_not_know_an_operation():
    lstm = torch.nn.LSTM(2, 2)
    with pytest.raises(RuntimeError, match=_private.NO_BATCHING_RULE):
        torch.vmap(lambda x: lstm(x)[0])(torch.zeros(3, 4, 2))


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
    assert {*_private.COMPILER_MODULES} <= sys.modules.keys()


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


@pytest.mark.slow
def test_the_compiler_is_not_imported_before_it_is_used():
    script = "import sys, lightning_feddua._private; print('torch._inductor.compile_fx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_workers_of_a_loader_are_ended():
    loader = DataLoader([1, 2, 3], batch_size=None, num_workers=1, persistent_workers=True)
    _private.end_workers(loader)
    before = set(multiprocessing.active_children())
    next(iter(loader))
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 1
    _private.end_workers(loader)
    assert not any(process.is_alive() for process in started)


class Sleeping(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        time.sleep(100 if index else 0)
        return index


def test_workers_are_ended_at_once_and_forgotten():
    loader = DataLoader(Sleeping(), batch_size=None, num_workers=1, persistent_workers=True)
    before = set(multiprocessing.active_children())
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    _private.forget_workers(loader)
    _private.forget_workers(loader)
    # Torch would raise an error here, or a little later.
    worker.kill()
    worker.join()
    time.sleep(0.05)
    start = time.monotonic()
    _private.end_workers(loader, at_once=True)
    assert time.monotonic() - start < 3


def test_an_iterator_of_a_loader_counts_its_batches():
    batches = iter(DataLoader(range(6), batch_size=2))
    assert _private.batches_read(batches) == 0
    next(batches)
    assert _private.batches_read(batches) == 1
    assert _private.batches_read(iter([1])) is None


def test_the_tracer_has_a_logger_of_its_own():
    from torch._subclasses import fake_tensor

    assert fake_tensor.log.name == _private.TRACER_LOGGER


def test_a_group_of_one_can_stand_in_for_the_world(process_group):
    world = torch.distributed.group.WORLD
    group = _private.lone_group()
    with _private.in_place_of_the_world(group):
        assert torch.distributed.group.WORLD is group is not world
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
        assert torch.distributed.get_process_group_ranks(group) == [0]
        tensor = torch.ones(2)
        torch.distributed.all_reduce(tensor)
        torch.distributed.broadcast(tensor, src=0)
        assert tensor.tolist() == [1.0, 1.0]
    assert torch.distributed.group.WORLD is world
    torch.distributed.destroy_process_group(group)
    assert torch.distributed.is_initialized()


def test_a_mode_sees_every_kernel_also_those_of_the_backward_pass():
    seen = []

    class Mode(_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 3, requires_grad=True)
    with Mode():
        (x @ torch.ones(3, 2)).sum().backward()
    assert seen.count("mm") == 2
    assert "sum" in seen
    assert x.grad.tolist() == [[2.0] * 3] * 2
