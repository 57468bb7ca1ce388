"""w4q.Linear on the CPU."""

from __future__ import annotations

import pytest
import w4q
from conftest import VARIANTS

torch = pytest.importorskip("torch")

#: Sums of up to 768 products in f32, in another order: 768 · 2^-24 of the sum of magnitudes, times a few.
SUMS = 2e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_multiplies_with_the_decoded_weight(variant, make):
    torch.manual_seed(1)
    opened = w4q.open(make(variant))
    for name in [opened.names[0], opened.names[-1]]:
        linear = w4q.Linear(opened, name, torch.nn.Parameter(torch.randn(opened.linear(name).out_features)))
        weight = linear.decode().double()
        for shape in [(1,), (3,), (2, 5), (33,), (0,)]:
            x = torch.randn(*shape, linear.in_features)
            y = linear(x)
            expected = x.double() @ weight.T + linear.bias.double()
            scale = x.double().abs() @ weight.abs().T + 1
            assert y.shape == expected.shape and y.dtype == x.dtype
            assert ((y - expected).abs() <= SUMS * scale).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache", [False, True])
def test_sixteen_bit_activations(dtype, cache, make):
    torch.manual_seed(2)
    opened = w4q.open(make("kbit4"))
    linear = w4q.Linear(opened, opened.names[0], cache=cache)
    x = torch.randn(4, linear.in_features).to(dtype)
    y = linear(x)
    expected = x.double() @ linear.decode().double().T
    # The result is rounded once; with a cache the weights are too.
    unit = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    scale = x.double().abs() @ linear.decode().double().abs().T
    assert y.dtype == dtype and ((y - expected).abs() <= 2 * unit * scale).all()


def test_gradients_by_the_input(make):
    opened = w4q.open(make("kbit4"))
    linear = w4q.Linear(opened, opened.names[0])
    x = torch.randn(3, linear.in_features, requires_grad=True)
    linear(x).square().sum().backward()
    weight = linear.decode()
    expected = 2 * (x.detach() @ weight.T) @ weight
    assert torch.allclose(x.grad, expected, rtol=1e-3, atol=1e-3)
    assert not list(linear.parameters())


def test_the_operation_is_what_torch_wants(make):
    opened = w4q.open(make("kbit4"))
    linear = w4q.Linear(opened, opened.names[0])
    x = torch.randn(3, linear.in_features, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.w4q.linear.default, (x, linear.owner.number), test_utils=tests)


def test_a_module_without_planes_in_its_state(make):
    opened = w4q.open(make("kbit4"))
    linear = w4q.Linear(opened, opened.names[0])
    assert not linear.state_dict() and "kbit4-b32-e4m4" in repr(linear)
