"""Each front on a CUDA GPU, in bfloat16, where the Triton backend computes it."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the package transformers (extra transformers)")

from compat.tiny import V, llama
from ratio_kl.compat.transformers import fused_head

pytestmark = pytest.mark.gpu

# Logits are float32 sums of bfloat16 products here and in the reference: 5e-5 is the backend's own.
LOGP_ERROR = 5e-5


def scene():
    """A model on the GPU, ids, and what float64 says of the same hidden states and weight."""
    model = llama().bfloat16().cuda()
    ids = torch.randint(3, V, (4, 33), device="cuda")
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].double()
    logits = hidden @ model.lm_head.weight.double().T
    exact = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return model, ids, exact


def assert_trained(model):
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_transformers():
    model, ids, exact = scene()
    fused_head(model)
    got = model(
        input_ids=ids,
        from_hidden=lambda hidden, head: head.logprob(hidden[:, :-1], ids[:, 1:], backend="triton"),
    ).logps
    assert (got - exact).abs().max().item() < LOGP_ERROR
    got.sum().backward()
    assert_trained(model)


def test_trls_head():
    pytest.importorskip("trl", reason="needs the package trl (extra trl)")
    from ratio_kl.compat.trl import add_fused_lm_head

    model, ids, exact = scene()
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    add_fused_lm_head(model, outputs=outputs)
    out = model(input_ids=ids, labels=ids, fused_lm_head=True)
    assert (out.log_probs - exact).abs().max().item() < LOGP_ERROR
    assert all(getattr(out, name).shape == exact.shape for name in outputs)
    out.loss.backward()
    assert_trained(model)


@pytest.mark.parametrize("options", [{}, {"top_entropy_quantile": 0.5, "beta": 0.1}], ids=str)
def test_grpo(tmp_path, options):
    """The head and the whole loss, in steps under bfloat16 autocast: first the same numbers, and
    after updates that were rounded in another order nearly the same."""
    pytest.importorskip("trl", reason="needs the package trl (extra trl)")
    from trl import GRPOTrainer

    from compat.test_trl_grpo import build, saved, vary
    from compat.tiny import run
    from ratio_kl.compat.trl import RatioKLGRPOTrainer, use_ratio_kl

    folder = saved(tmp_path / "model", llama())
    logs = []
    for cls, front in [(GRPOTrainer, use_ratio_kl), (RatioKLGRPOTrainer, lambda trainer: None)]:
        trainer = build(cls, folder, tmp_path, use_cpu=False, bf16=True, max_steps=2, **options)
        front(trainer)
        logs.append(run(trainer, vary).logs)
    for name in ("loss", "entropy", "grad_norm"):
        assert logs[1][0][name] == pytest.approx(logs[0][0][name], rel=2e-2, abs=1e-4), name
    assert logs[0][1].keys() == logs[1][1].keys()
