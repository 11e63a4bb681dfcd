import pytest
import torch
from torch import nn

from lightning_feddua import ConfigurationError
from lightning_feddua.host.buffers import ModuleBuffers
from lightning_feddua.host.parameters import FlatParameters, trainable_parameters
from lightning_feddua.host.tensor_checks import check_initialised
from lightning_feddua.vectors import squared_norm


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_vector_and_parameters_share_memory():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    flat = FlatParameters(module)
    assert torch.equal(flat.vector, before)
    flat.load(torch.arange(len(flat), dtype=torch.float32))
    assert module[0].weight[0, 1] == 1
    with torch.no_grad():
        module[1].bias.fill_(7.0)
    assert torch.equal(flat.vector[-2:], torch.full((2,), 7.0))


def test_delta_is_taken_in_place():
    module = nn.Linear(3, 2)
    flat = FlatParameters(module)
    weights = flat.vector.clone()
    with torch.no_grad():
        module.weight.add_(1.0)
    delta = flat.take_delta(weights)
    assert delta.data_ptr() == flat.vector.data_ptr()
    torch.testing.assert_close(delta, torch.tensor([1.0] * 6 + [0.0] * 2), rtol=1e-6, atol=0)


def test_delta_of_a_bfloat16_module_is_exact_in_float32():
    module = nn.Linear(3, 2).bfloat16()
    flat = FlatParameters(module)
    weights = torch.randn(8)  # not representable in bfloat16
    flat.load(weights)
    delta = flat.take_delta(weights)
    assert delta.dtype == torch.float32
    assert torch.equal(delta, torch.zeros(8))  # no step, no update: the rounding is not mistaken for one


def test_tied_once_and_frozen_never():
    module = Tied()
    frozen = module.frozen.weight.data_ptr()
    flat = FlatParameters(module)
    assert len(flat) == 15
    assert module.head.weight is module.embedding.weight
    assert module.frozen.weight.data_ptr() == frozen


def test_channels_last_is_kept():
    module = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    weight = module.weight.detach().clone()
    FlatParameters(module)
    assert module.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(module.weight, weight)


def test_release_gives_parameters_their_own_memory():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    flat = FlatParameters(module)
    values = flat.vector.clone()
    flat.release()
    flat.vector.zero_()
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in module.parameters()]), values)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "several dtypes"),
        (nn.Module(), "no trainable parameters"),
    ],
)
def test_modules_that_cannot_be_trained(module, message):
    with pytest.raises(ConfigurationError, match=message):
        trainable_parameters(module)


def test_lazy_layers_have_to_see_a_batch_first():
    with pytest.raises(ConfigurationError, match="not initialised"):
        check_initialised(nn.LazyLinear(3))


def test_squared_norm_is_float64_over_chunks():
    vector = torch.randn(200_001) * 1e-20
    result = squared_norm(vector)
    assert result.dtype == torch.float64
    assert result.item() == pytest.approx(vector.double().square().sum().item(), rel=1e-12)


def test_buffers_are_restored_even_when_reassigned():
    module = nn.BatchNorm1d(4)
    buffers = ModuleBuffers(module)
    assert (buffers.float_count, buffers.integer_count) == (8, 1)
    module.running_mean = torch.arange(4.0)
    module.num_batches_tracked += 5
    assert torch.equal(buffers.floats(torch.float32), torch.tensor([0.0, 1, 2, 3, 1, 1, 1, 1]))
    assert buffers.integers().tolist() == [5]
    buffers.restore()
    assert module.running_mean.tolist() == [0] * 4
    assert module.num_batches_tracked == 0


def test_only_changed_buffers_are_taken_over():
    module = nn.BatchNorm1d(2)
    buffers = ModuleBuffers(module)
    changed = torch.tensor([True, False, False, False])
    buffers.update(torch.full((4,), 7.0), changed, torch.tensor([3]))
    buffers.restore()
    assert module.running_mean.tolist() == [7, 0]
    assert module.running_var.tolist() == [1, 1]
    assert module.num_batches_tracked == 3


def test_buffers_of_other_dtypes_keep_their_bits():
    module = nn.Module()
    values = {
        "angles": torch.polar(torch.ones(3), torch.arange(3.0)),
        "pi": torch.tensor([torch.pi], dtype=torch.float64),
        "large": torch.tensor([2**60 + 1]),
        "mask": torch.ones(300, 300, dtype=torch.bool),
        "nothing": torch.tensor([float("-inf")]),
    }
    for name, value in values.items():
        module.register_buffer(name, value.clone())
    buffers = ModuleBuffers(module)
    floats, integers = buffers.floats(torch.float32), buffers.integers()
    assert (len(floats), len(integers)) == (2 * 3 + 1 + 1, 1)
    buffers.update(floats, torch.zeros_like(floats, dtype=torch.bool), integers)
    buffers.restore()
    for name, value in values.items():
        assert torch.equal(getattr(module, name), value), name
    module.mask[0, 0] = False
    with pytest.raises(ConfigurationError, match=r"changed the integer buffer `mask` of 90,000 elements\."):
        buffers.integers()
