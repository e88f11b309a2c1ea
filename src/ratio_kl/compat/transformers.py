"""Any causal language model of transformers: a loss or log-probabilities in place of logits.

    from ratio_kl.compat.transformers import fused_head

    fused_head(model)  # this instance only
    scores = model(
        input_ids=ids,
        attention_mask=attention_mask,
        from_hidden=lambda hidden, head: head.logprob(hidden[:, :-1], ids[:, 1:], mask[:, 1:]),
    )

The model's own forward runs up to its head, with all its arguments; what would enter the head goes
to `from_hidden`, and what that returns is the call's result. All of it happens inside the forward
of the (wrapped) model, as DDP, FSDP and ZeRO-3 need it. Without `from_hidden` nothing changes.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from .. import FusedLinearRatioKLLoss, LogProbs, LossOutput, linear_logprob
from . import require
from .heads import LinearHead, call_head

require("transformers", extra="transformers")

__all__ = ["FusedHead", "Head", "fused_head", "logit_modifiers"]

# Factor on the logits, by the name under which a config holds it. They multiply, but Granite's.
_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_MULTIPLIES_BY_LOGITS_SCALING = {"hyperclovax"}
# MPT's config has a logit_scale that its model never reads; MiniCPM3 scales what enters the head.
_UNSCALED = {"mpt", "minicpm3"}


def logit_modifiers(config: Any) -> dict[str, Any]:
    """What a model does to its logits, as options of RatioKLConfig and linear_logprob.

    Args:
        config: a transformers config; of a multimodal model, its text part is read.

    Returns:
        logit_scale (Cohere, Falcon-H1 and Muse multiply, Granite divides, HyperCLOVA X
        multiplies by the name that Granite divides by), softcap (Gemma and others) and vocab_size
        (Inkling leaves out padded rows).
    """
    config = config.get_text_config()
    scale = 1.0
    if config.model_type not in _UNSCALED:
        name, value = _first(config, _SCALES)
        divides = config.model_type not in _MULTIPLIES_BY_LOGITS_SCALING
        scale = 1 / value if name == "logits_scaling" and divides else value
    softcap = _first(config, _SOFTCAPS)[1] if _first(config, _SOFTCAPS)[0] else None
    return {
        "logit_scale": scale,
        "softcap": softcap,
        "vocab_size": getattr(config, "unpadded_vocab_size", None),
    }


def _first(config: Any, names: tuple[str, ...]) -> tuple[str, float]:
    """The first of these names that the config sets, and its value; ("", 1.0) for none."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return name, float(value)
    return "", 1.0


@dataclass(frozen=True)
class Head:
    """A model's head during one forward, for the function `from_hidden`."""

    weight: Tensor
    """[V, H]; with LoRA on the head [V, H + ranks], as the hidden states that come with it."""
    bias: Tensor | None
    modifiers: dict[str, Any]
    """logit_scale, softcap and vocab_size (`logit_modifiers`)."""
    aux_loss: Tensor | None
    """The model's load-balancing loss, unweighted, where it was asked for its router logits."""

    def logprob(
        self,
        hidden: Tensor,
        action_ids: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> LogProbs:
        """ratio_kl.linear_logprob with this head and the model's own logit modifiers.

        Row t of `hidden` predicts `action_ids` at t: shift and cut before the call.
        """
        return linear_logprob(
            hidden,
            self.weight,
            action_ids,
            attention_mask,
            bias=self.bias,
            **self.modifiers,
            **options,
        )

    def loss(
        self, loss_fn: FusedLinearRatioKLLoss, hidden: Tensor, *args: Any, **keywords: Any
    ) -> LossOutput:
        """`loss_fn` with this head; the other arguments are those of its forward, without weight.

        Raises:
            ValueError: its config changes the logits in another way than the model's does.
        """
        for name, expected in self.modifiers.items():
            given = getattr(loss_fn.config, name)
            if given != expected:
                raise ValueError(
                    f"the loss has {name}={given!r}, but the model's logits need {expected!r}; "
                    "pass **logit_modifiers(model.config) as options of the loss"
                )
        out: LossOutput = loss_fn(hidden, self.weight, *args, bias=self.bias, **keywords)
        return out


FromHidden = Callable[[Tensor, Head], Any]


class FusedHead:
    """Handle of a model's replaced forward: `remove()`, or the end of a with block, undoes it."""

    def __init__(self, model: Any, replaced: Callable[..., Any] | None) -> None:
        self._model, self._replaced = model, replaced
        self._installed = model.forward

    def remove(self) -> None:
        """Give the model its former forward back."""
        if self._model.__dict__.get("forward") is not self._installed:
            raise RuntimeError("the model's forward has been replaced again since; undo that first")
        del self._model.forward
        if self._replaced is not None:
            self._model.forward = self._replaced

    def __enter__(self) -> "FusedHead":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def fused_head(model: Any) -> FusedHead:
    """Let `model(..., from_hidden=f)` return f(hidden, head) in place of its output.

    Only this instance changes, and its forward keeps its signature, which `generate` inspects.
    Without `from_hidden` the former forward runs.

    Args:
        model: a transformers model with a linear lm_head, bare or inside a PEFT model. Patch it
            before or after PEFT, and before DDP, FSDP or DeepSpeed wrap it.

    Returns:
        A handle that undoes it.

    Raises:
        TypeError: the model has no lm_head.
    """
    model = bare_model(model)
    if not isinstance(getattr(model, "get_output_embeddings", lambda: None)(), nn.Module):
        raise TypeError(f"model must have an lm_head; got {type(model).__name__}")
    former, inner = model.__dict__.get("forward"), model.forward
    tap = _Tap()

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, from_hidden: FromHidden | None = None, **kwargs: Any) -> Any:
        own_forward = functools.partial(call_former, inner, self, *args, **kwargs)
        if from_hidden is None:
            return own_forward()
        if kwargs.get("labels") is not None:
            raise ValueError("labels ask for the model's own loss, which from_hidden replaces")
        return _headless(self, own_forward, from_hidden, tap)

    model.forward = MethodType(forward, model)
    return FusedHead(model, former)


# A compiler may take the model's own forward, but not the exchange of modules around it.
@torch.compiler.disable(recursive=False)
def _headless(
    model: Any, own_forward: Callable[[], Any], from_hidden: FromHidden, tap: "_Tap"
) -> Any:
    """`from_hidden` on what enters the model's head while `own_forward` runs."""
    head = model.get_output_embeddings()
    with _tapped(model, head, tap):
        output = own_forward()
    entered, tap.entered = tap.entered, []
    if len(entered) != 1:
        raise ValueError(
            "the model's forward must call its lm_head once, on all positions; it called it "
            f"{len(entered)} times"
        )
    if isinstance(output, tuple):
        raise ValueError("the model returned a tuple, without names: leave return_dict as it is")
    modifiers, aux_loss = logit_modifiers(model.config), getattr(output, "aux_loss", None)
    logits = getattr(output, "logits", None)
    if tap.checked != modifiers and logits is not None:
        # The host waits for the device, once a model.
        _check_modifiers(logits, entered[0], modifiers)
        tap.checked = modifiers

    def compute(linear: LinearHead) -> Any:
        return from_hidden(linear.hidden, Head(linear.weight, linear.bias, modifiers, aux_loss))

    return call_head(head, entered[0], compute)


def bare_model(model: Any) -> Any:
    """The transformers model itself, or the one inside a PEFT model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def call_former(inner: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """The former forward on `model`, which may be a deep copy of the one that it belonged to."""
    if isinstance(inner, MethodType):
        return inner.__func__(model, *args, **kwargs)
    if isinstance(inner, functools.partial):  # accelerate's hooks
        given = [model if isinstance(arg, nn.Module) else arg for arg in inner.args]
        return inner.func(*given, *args, **inner.keywords | kwargs)
    return inner(*args, **kwargs)


class _Tap(nn.Module):
    """Stands in for the head while the model's own forward runs, and keeps what enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[Tensor] = []
        self.weight: Tensor
        self.checked: dict[str, Any] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.entered.append(hidden)
        return _probe(hidden)


def _probe(hidden: Tensor) -> Tensor:
    """Stands for the logits, which the model goes on to scale or cap: 8, 16, ... 64, 64, ..."""
    return (8 * torch.ones_like(hidden.detach()[..., :1]).cumsum(-2)).clamp(max=64)


@torch.compiler.disable
def _check_modifiers(logits: Tensor, hidden: Tensor, modifiers: dict[str, Any]) -> None:
    """ValueError unless the model has made of the probe what `modifiers` say."""
    softcap = modifiers["softcap"]
    expected = modifiers["logit_scale"] * _probe(hidden).float()
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    # Half precision rounds each step of the model's.
    same = (logits.detach().float() - expected).abs() <= 0.01 * expected.abs()
    if not same.all():
        raise ValueError(
            "model must scale and cap its logits as logit_modifiers reads in its config, "
            f"{modifiers}; it does something else. Set logit_scale (a factor, 1.0 for none) and "
            "final_logit_softcapping (None for none) of its text config to what it does"
        )


@contextmanager
def _tapped(model: nn.Module, head: nn.Module, tap: _Tap) -> Iterator[None]:
    """`tap` in the head's place. Some models look at the weight's dtype beside calling the head."""
    owner, name = next(
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if child is head
    )
    tap.entered.clear()
    first = next(head.parameters())
    tap.weight = torch.empty(0, dtype=first.dtype, device=first.device)
    setattr(owner, name, tap)
    try:
        yield
    finally:
        setattr(owner, name, head)
