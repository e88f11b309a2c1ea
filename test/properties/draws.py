"""What hypothesis draws for the property tests, and the call that is made from it.

A draw holds sizes, layouts, dtypes, kinds of values and options: few and small things, which
hypothesis can shrink. The numbers come from a seed in the draw. Every tensor of a call is made
here, for the CPU and for the GPU, small and large.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ratio_kl.config import IMPORTANCE_SAMPLING_LEVELS, KL_ESTIMATORS, LOSS_TYPES, RatioKLConfig
from ratio_kl.reference import reference_logprob
from support import Problem


def holds(draws: st.SearchStrategy, *, few: int) -> Callable[[Callable[[Any], None]], Any]:
    """Make `check(draw)` a test on `few` draws, ever the same, and a slow one on 40 times more."""

    def decorate(check: Callable[[Any], None]) -> Any:
        @pytest.mark.parametrize("count", [few, pytest.param(40 * few, marks=pytest.mark.slow)])
        @pytest.mark.timeout(1800)
        def test(count: int) -> None:
            limits = settings(
                max_examples=count,
                derandomize=True,
                deadline=None,
                phases=(Phase.generate,),
                suppress_health_check=[HealthCheck.too_slow],
            )
            limits(given(draws)(check))()

        test.__doc__ = check.__doc__
        return test

    return decorate


class Sizes(NamedTuple):
    """Largest B, T, H and V of a draw."""

    B: int
    T: int
    H: int
    V: int


SMALL = Sizes(4, 9, 40, 140)
"""Up to 36 rows and 3 column tiles of 64, with tails; H past one step of 32 of a product."""
LARGE = Sizes(16, 700, 1100, 70_000)
"""On a GPU: up to 88 row tiles, hundreds of column tiles, and past 65,535 columns."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("plain", "transposed", "sliced", "misaligned", "expanded")
VALUES = ("normal", "small", "large", "zero", "offset", "impossible")
MASKS = ("all", "some", "some", "some", "none", "one", "prefix")
MASK_DTYPES = (torch.bool, torch.int64, torch.float32, torch.uint8)
ID_DTYPES = (torch.int64, torch.int32)
SHAPES = ("sequence", "column", "token")


@dataclass(frozen=True)
class Head:
    """A call of linear_logprob."""

    seed: int
    B: int
    T: int
    H: int
    V: int
    hidden_dtype: torch.dtype
    weight_dtype: torch.dtype
    hidden_layout: str
    weight_layout: str
    values: str
    mask: str
    mask_dtype: torch.dtype
    id_dtype: torch.dtype
    bias: bool
    temperature: str | float
    logit_scale: float
    softcap: float | None
    padding: int
    """Rows of the weight that vocab_size leaves out; they hold NaN."""
    chunk_bytes: int


def _sizes(most: Sizes) -> dict[str, st.SearchStrategy[int]]:
    # Around the edges of tiles as often as anywhere else.
    edges = [n for n in (1, 63, 64, 65, 128, 129, most.V) if n <= most.V]
    return {
        "B": st.integers(1, most.B),
        "T": st.integers(1, most.T),
        "H": st.integers(1, most.H),
        "V": st.integers(1, most.V) | st.sampled_from(edges),
    }


def heads(most: Sizes = SMALL, dtypes: tuple[torch.dtype, ...] = FLOATS) -> st.SearchStrategy[Head]:
    """Draws of Head."""
    return st.builds(
        Head,
        seed=st.integers(0, 2**31),
        **_sizes(most),
        hidden_dtype=st.sampled_from(dtypes),
        weight_dtype=st.sampled_from(dtypes),
        hidden_layout=st.sampled_from(LAYOUTS),
        weight_layout=st.sampled_from(LAYOUTS),
        values=st.sampled_from(VALUES),
        mask=st.sampled_from(MASKS),
        mask_dtype=st.sampled_from(MASK_DTYPES),
        id_dtype=st.sampled_from(ID_DTYPES),
        bias=st.booleans(),
        temperature=st.sampled_from((1.0, 0.4, *SHAPES)),
        logit_scale=st.sampled_from((1.0, 0.3)),
        softcap=st.sampled_from((None, 4.0)),
        padding=st.integers(0, 3),
        chunk_bytes=st.sampled_from((1, 40_000, 2**27)),
    )


def generator(seed: int) -> Callable[..., Tensor]:
    """normal(*shape) of float64, on the CPU, from a seed."""
    random = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)


def laid_out(matrix: Tensor, layout: str) -> Tensor:
    """The matrix (its first row throughout, if expanded) in memory of another form; a leaf."""
    if layout == "transposed":
        matrix = matrix.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout in ("sliced", "misaligned"):
        # Rows twice as far apart as they are long, or as many elements past an aligned address.
        start = 0 if layout == "sliced" else 1
        space = matrix.new_full((*matrix.shape[:-1], 2 * matrix.shape[-1] + start), torch.nan)
        matrix = space[..., start : start + matrix.shape[-1]].copy_(matrix)
    elif layout == "expanded":
        matrix = matrix.flatten(0, -2)[0].expand(matrix.shape)
    return matrix.detach()


def _hidden_and_head(head: Head) -> tuple[Tensor, Tensor, Tensor | None]:
    normal = generator(head.seed)
    hidden, weight = normal(head.B, head.T, head.H), normal(head.V, head.H) * head.H**-0.5
    bias = normal(head.V) if head.bias or head.values in ("offset", "impossible") else None
    hidden = hidden * {"small": 1e-3, "large": 8.0, "zero": 0.0}.get(head.values, 1.0)
    if bias is not None and head.values == "offset":
        bias = bias + 300.0
    if bias is not None and head.values == "impossible":
        bias = torch.where(bias > 0.5, -torch.inf, bias)
        bias[head.V // 2] = 0.0
    return hidden, weight, bias


def mask_of(kind: str, B: int, T: int, seed: int) -> Tensor:
    """[B, T] bool."""
    random = torch.Generator().manual_seed(seed + 1)
    if kind == "prefix":
        return torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=random)
    share = {"all": 1.1, "none": -1.0, "some": 0.6, "one": -1.0}[kind]
    mask = torch.rand(B, T, generator=random) < share
    if kind == "one":
        mask.view(-1)[seed % (B * T)] = True
    return mask


def spread(kind: str, value: Tensor) -> Tensor:
    """A [B, T] value as one entry a sequence, [B] or [B, 1], or a token."""
    return {"sequence": value[:, 0], "column": value[:, :1], "token": value}[kind]


class HeadCall(NamedTuple):
    """Arguments of linear_logprob; leaves require a gradient."""

    hidden: Tensor
    weight: Tensor
    action_ids: Tensor
    attention_mask: Tensor
    options: dict[str, Any]

    @property
    def active(self) -> Tensor:
        return self.attention_mask != 0

    @property
    def leaves(self) -> list[Tensor]:
        bias = self.options.get("bias")
        return [self.hidden, self.weight, *([] if bias is None else [bias])]


def head_call(head: Head, device: str = "cpu") -> HeadCall:
    """The tensors of a draw: NaN in the rows that are left out, any id where nothing is active."""
    hidden, weight, bias = _hidden_and_head(head)
    random = torch.Generator().manual_seed(head.seed + 2)
    mask = mask_of(head.mask, head.B, head.T, head.seed)
    ids = torch.randint(head.V, (head.B, head.T), generator=random)
    if bias is not None and head.values == "impossible":
        possible = (bias > -torch.inf).nonzero()[:, 0]
        ids = possible[ids % len(possible)]
    ids = torch.where(mask, ids, torch.tensor([-100, head.V + head.padding, 2**31 - 1])[ids % 3])
    if head.hidden_layout != "expanded":
        hidden = torch.where(mask[..., None], hidden, torch.nan)
    vocab_size = None
    if head.padding and head.weight_layout != "expanded":
        vocab_size = head.V
        weight = torch.cat([weight, weight.new_full((head.padding, head.H), torch.nan)])
        bias = (
            None if bias is None else torch.cat([bias, bias.new_full((head.padding,), torch.nan)])
        )
    tau: float | Tensor = 1.0
    if isinstance(head.temperature, str):
        tau = 0.4 + torch.rand(head.B, head.T, generator=random)
        tau = spread(head.temperature, tau).to(device)
    else:
        tau = head.temperature
    leaf = {"hidden": (hidden, head.hidden_dtype), "weight": (weight, head.weight_dtype)}
    hidden, weight = (
        laid_out(value.to(dtype).to(device), getattr(head, f"{name}_layout")).requires_grad_()
        for name, (value, dtype) in leaf.items()
    )
    if bias is not None:
        bias = bias.to(head.weight_dtype).to(device).requires_grad_()
    options = {
        "bias": bias,
        "temperature": tau,
        "logit_scale": head.logit_scale,
        "softcap": head.softcap,
        "vocab_size": vocab_size,
    }
    ids = ids.to(head.id_dtype).to(device)
    return HeadCall(hidden, weight, ids, mask.to(head.mask_dtype).to(device), options)


def in_float64(call: HeadCall) -> HeadCall:
    """The same numbers as fresh float64 leaves."""

    def widened(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().double().requires_grad_(value.requires_grad)

    options = {name: widened(value) for name, value in call.options.items()}
    return call._replace(hidden=widened(call.hidden), weight=widened(call.weight), options=options)


@dataclass(frozen=True)
class Loss:
    """A call of the whole loss."""

    head: Head
    config: RatioKLConfig
    advantages: str
    old_logps: bool
    reference: str
    sampling_ratio: str | None
    sampling_logps: bool
    num_items: int | None
    accumulation_steps: int


@st.composite
def configs(draw: st.DrawFn, *, smooth: bool = False) -> RatioKLConfig:
    """Any options; `smooth`: none at whose edges float32 rounding decides about whole sequences."""
    loss_type = draw(st.sampled_from(LOSS_TYPES))
    level = "token"
    if loss_type != "vespo":
        level = draw(st.sampled_from(IMPORTANCE_SAMPLING_LEVELS))
    options: dict[str, Any] = {}
    if loss_type not in ("cispo", "sapo", "vespo"):
        options["delta"] = draw(st.sampled_from((None, 1.1, 3.0)))
    if not smooth:
        options["off_policy_mask_threshold"] = draw(st.sampled_from((None, -0.05, 0.13)))
    return RatioKLConfig(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=draw(st.sampled_from((0.0, 0.05, 1.0))),
        kl_estimator=draw(st.sampled_from(KL_ESTIMATORS)),
        use_bias_correction_kl=draw(st.booleans()),
        epsilon_low=draw(st.sampled_from((0.0, 0.2, 0.5))),
        epsilon_high=draw(st.sampled_from((0.28, 2.0) if loss_type == "cispo" else (None, 0.28))),
        max_completion_length=7,
        # Shares at which no rank of up to 36 tokens is a whole number.
        top_entropy_quantile=draw(st.sampled_from((1.0,) if smooth else (1.0, 0.23, 0.57))),
        entropy_coef=draw(st.sampled_from((0.0, 0.01, -0.1))),
        log_ratio_limit=draw(st.sampled_from((20.0, None) if smooth else (20.0, None, 0.3))),
        temperature=draw(st.sampled_from((1.0, 0.6))),
        logit_scale=draw(st.sampled_from((1.0, 0.3))),
        softcap=draw(st.sampled_from((None, 4.0))),
        **options,
    )


def losses(
    most: Sizes = SMALL,
    dtypes: tuple[torch.dtype, ...] = (torch.float64,),
    *,
    smooth: bool = False,
) -> st.SearchStrategy[Loss]:
    """Draws of Loss."""
    return st.builds(
        Loss,
        head=heads(most, dtypes),
        config=configs(smooth=smooth),
        advantages=st.sampled_from(SHAPES),
        old_logps=st.booleans(),
        reference=st.sampled_from(("logps", "hidden")),
        sampling_ratio=st.sampled_from((None, *SHAPES)),
        sampling_logps=st.booleans(),
        num_items=st.sampled_from((None, 0, 50)),
        accumulation_steps=st.sampled_from((1, 3)),
    )


def loss_call(drawn: Loss, device: str = "cpu") -> Problem:
    """The tensors of a draw, NaN and inf wherever nothing is active."""
    call = head_call(drawn.head, device)
    exact = in_float64(call)
    normal = generator(drawn.head.seed + 3)
    B, T = drawn.head.B, drawn.head.T
    options: dict[str, Any] = {}
    if call.options["bias"] is not None:
        options["bias"] = call.options["bias"]
    if isinstance(call.options["temperature"], Tensor):
        options["temperature"] = call.options["temperature"]
    modifiers = {
        "temperature": options.get("temperature", drawn.config.temperature),
        "logit_scale": drawn.config.logit_scale,
        "softcap": drawn.config.softcap,
        "bias": exact.options["bias"],
        "vocab_size": call.options["vocab_size"],
    }
    with torch.no_grad():
        tensors = (exact.hidden, exact.weight, exact.action_ids, exact.active)
        logps = reference_logprob(*tensors, **modifiers)[0].cpu()
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf]).double()
    active = call.active.cpu()

    def per_token(value: Tensor) -> Tensor:
        spoilt = torch.where(active, value, junk[torch.arange(B * T).view(B, T) % 3])
        return spoilt.to(call.hidden.dtype).to(device)

    def shaped(kind: str, value: Tensor) -> Tensor:
        return per_token(value) if kind == "token" else spread(kind, value).to(device)

    if drawn.old_logps:
        options["old_logps"] = per_token(logps + 0.4 * normal(B, T))
    if drawn.sampling_logps:
        options["sampling_logps"] = per_token(logps + 0.3 * normal(B, T))
    if drawn.reference == "logps":
        options["ref_logps"] = per_token(logps + 0.3 * normal(B, T))
    else:
        options["ref_hidden"] = call.hidden.detach() + 0.1
    if drawn.sampling_ratio is not None:
        options["sampling_ratio"] = shaped(drawn.sampling_ratio, (0.3 * normal(B, T)).exp())
    if drawn.num_items is not None:
        options["num_items_in_batch"] = drawn.num_items
    options["gradient_accumulation_steps"] = drawn.accumulation_steps
    advantages = shaped(drawn.advantages, normal(B, T).round(decimals=1))
    inputs = (call.hidden, call.weight, call.action_ids, call.attention_mask, advantages)
    return Problem(inputs, options)


def config_of(drawn: Loss) -> RatioKLConfig:
    """The drawn options with the head's vocab_size."""
    from dataclasses import replace

    padded = drawn.head.padding and drawn.head.weight_layout != "expanded"
    return replace(drawn.config, vocab_size=drawn.head.V if padded else None)
