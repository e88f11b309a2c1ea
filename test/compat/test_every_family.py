"""Every causal language model of the installed transformers that a small config builds."""

import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="needs the package transformers (extra transformers)")

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from compat.tiny import SIZES, assert_near
from ratio_kl.compat.transformers import fused_head

MOST_PARAMETERS = 30_000_000
NAMES = SIZES | {
    "is_decoder": True,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
}
"""One size under the names that families have for it."""
OTHER_HEADS = {"dory"}
"""Families whose head is no linear layer, and is refused."""


@pytest.fixture
def poisoned_allocations():
    """Off: it would write to the gigabytes that a family of one size only asks for."""


def small(config_class, model_class):
    """A model, or None where these sizes do not make one that runs."""
    try:
        config = config_class(**NAMES)
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
        if size > MOST_PARAMETERS:
            return None
        torch.manual_seed(0)
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            logits = model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits
    except Exception:
        return None
    return model if logits.dim() == 3 and logits.isfinite().all() else None


@pytest.mark.slow
def test_each_says_what_its_logits_say():
    """A family that a new release adds, with a factor of its own, shows here."""
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(2))
    checked = []
    for config_class, model_class in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        if config_class.model_type in OTHER_HEADS:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' about these sizes
            model = small(config_class, model_class)
        if model is None:
            continue
        with torch.no_grad():
            logits = model(input_ids=ids).logits
            expected = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
            fused_head(model)
            got = model(
                input_ids=ids, from_hidden=lambda hidden, head: head.logprob(hidden, ids).logps
            )
        assert_near(got, expected.float(), config_class.model_type)
        checked.append(config_class.model_type)
    assert len(checked) > 100
