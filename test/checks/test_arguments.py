"""Checks of types, shapes, dtypes and devices."""

import pytest
import torch

from ratio_kl.checks.arguments import (
    check_device,
    check_floating,
    check_head,
    check_integer,
    check_real,
    check_shape,
    check_tensor,
)

FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
OTHERS = {torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16, torch.uint64}
ALLOWED = {
    check_floating: FLOATS,
    check_integer: INTEGERS,
    check_real: FLOATS | INTEGERS | {torch.bool},
}


@pytest.mark.parametrize("dtype", sorted(FLOATS | INTEGERS | OTHERS | {torch.bool}, key=str))
@pytest.mark.parametrize("check", ALLOWED)
def test_dtypes(check, dtype: torch.dtype) -> None:
    tensor = torch.zeros(2).to(dtype)
    if dtype in ALLOWED[check]:
        assert check("x", tensor) is tensor
    else:
        with pytest.raises(ValueError, match=rf"^x must have .*dtype.*; got {dtype}$"):
            check("x", tensor)


@pytest.mark.parametrize("value", [None, 1.0, [1.0], "x"])
@pytest.mark.parametrize("check", [check_tensor, *ALLOWED])
def test_what_is_no_tensor(check, value) -> None:
    with pytest.raises(TypeError, match=f"^x must be a tensor; got .*{type(value).__name__}$"):
        check("x", value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor() -> None:
    """With strides too: it has no shape to look at."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(ValueError, match="^x must be a dense tensor; got a nested tensor of"):
        check_tensor("x", nested)


def test_a_parameter_of_a_lazy_module() -> None:
    with pytest.raises(ValueError, match="^x must hold numbers; got an uninitialized parameter"):
        check_tensor("x", torch.nn.LazyLinear(3).weight)


def test_shapes() -> None:
    tensor = torch.zeros(2, 3)
    check_shape("x", tensor, ((2, 3), "[B, T]"))
    check_shape("x", tensor, ((2,), "[B]"), ((2, 3), "[B, T]"))
    expected = r"^x must have shape \[B\] = \[2\] or \[B, 1\] = \[2, 1\]; got \[2, 3\]$"
    with pytest.raises(ValueError, match=expected):
        check_shape("x", tensor, ((2,), "[B]"), ((2, 1), "[B, 1]"))


def test_devices() -> None:
    check_device("x", torch.zeros(2), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^x must be on hidden's device, cpu; got meta$"):
        check_device("x", torch.zeros(2, device="meta"), torch.device("cpu"))


def test_a_head_comes_back_as_it_is() -> None:
    hidden, weight, bias = torch.zeros(2, 3, 4), torch.zeros(7, 4), torch.zeros(7)
    given = (hidden, weight, bias)
    assert all(a is b for a, b in zip(check_head(*given), given, strict=True))
    assert check_head(hidden, weight, None)[2] is None


def test_a_heads_errors_carry_its_prefix() -> None:
    with pytest.raises(ValueError, match=r"^ref_weight must .* H = 4 as in ref_hidden"):
        check_head(torch.zeros(2, 4), torch.zeros(7, 5), None, prefix="ref_")
    with pytest.raises(ValueError, match=r"^ref_bias must "):
        check_head(torch.zeros(2, 4), torch.zeros(7, 4), torch.zeros(6), prefix="ref_")


def test_a_square_weight_looks_like_no_transposed_one() -> None:
    check_head(torch.zeros(2, 4), torch.zeros(4, 4), None)
    with pytest.raises(ValueError, match="transposed"):
        check_head(torch.zeros(2, 4), torch.zeros(4, 7), None)
