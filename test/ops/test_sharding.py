"""When a backend hands over the gradient of hidden, so that its sum over ranks can begin."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
from kernels.head_cases import Case, make_case
from ratio_kl.kernels.tiles import tile_for
from ratio_kl.ops.contract import Needs, Saved, Want
from ratio_kl.ops.sharding import sharding_of
from ratio_kl.ops.torch import linear as torch_backend
from ratio_kl.ops.torch import products as torch_products
from ratio_kl.ops.triton import linear as triton_backend
from ratio_kl.ops.triton import products as triton_products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TILE = tile_for(torch.device(DEVICE), torch.bfloat16)
N, V, H = TILE.rows + 6, 2 * TILE.columns + 2, 16
"""Two row tiles and three column tiles, of which one block may hold one."""
BACKENDS = {
    "torch": (torch_backend, torch_products.RunningGradient, "result", "sum"),
    "triton": (triton_backend, triton_products._Sum, "out", "buffer"),
}


def backward(module, case: Case, chunk_bytes: int, done) -> torch.Tensor:
    head = dataclasses.replace(case.head, chunk_bytes=chunk_bytes)
    scores = module.forward(head, case.ids, case.mask, want=Want(entropy=True))
    saved = Saved(case.ids, scores.logps, scores.max, scores.log_sum, scores.entropies)
    grads = case.grad_logps, case.grad_entropies
    needs = Needs(hidden=True, weight=True, bias=False)
    return module.backward(head, saved, *grads, needs=needs, hidden_done=done)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [N, V + 70], ids=["more columns", "more rows"])
@pytest.mark.parametrize("chunk_bytes", [1, 2**28], ids=["many blocks", "one block"])
@pytest.mark.parametrize("name", BACKENDS)
def test_before_the_last_product_of_the_weights_gradient(
    monkeypatch, name, chunk_bytes, rows, dtype
):
    """Whole by then, in float32, and in every row; and no second copy of the weight's gradient."""
    module, sums, field, buffer = BACKENDS[name]
    events, handed, sums_of_weight = [], [], []
    add = sums.add

    def recorded(self, *arguments):
        events.append("weight" if getattr(self, field).shape[0] == V else "hidden")
        held = getattr(self, buffer)
        if events[-1] == "weight":
            sums_of_weight.append(0 if held is None else held.shape[0])
        return add(self, *arguments)

    def done(gradient):
        events.append("done")
        handed.append(gradient.clone())

    monkeypatch.setattr(sums, "add", recorded)
    case = make_case(rows, V, H, dtype=dtype, device=DEVICE)
    gradients = backward(module, case, chunk_bytes, done)
    assert events[-3:] == ["hidden", "done", "weight"]
    assert events.count("done") == 1
    assert handed[0].dtype == gradients.hidden.dtype == torch.float32
    assert handed[0].shape == (rows, H)
    assert torch.equal(handed[0], gradients.hidden)
    assert gradients.weight.dtype == dtype
    if chunk_bytes == 1:
        assert max(sums_of_weight) < V, "a part of the weight's gradient at a time"


@pytest.mark.parametrize("name", BACKENDS)
def test_not_at_all_where_no_row_has_a_coefficient(name):
    case = make_case(N, V, H, dtype=torch.float32, device=DEVICE)
    case = case._replace(grad_logps=torch.zeros(N, device=DEVICE), grad_entropies=None)
    handed = []
    gradients = backward(BACKENDS[name][0], case, 2**28, handed.append)
    assert handed == []
    assert (gradients.hidden == 0).all()


def test_no_group_is_no_cut():
    assert sharding_of(None, "whole") is None
    with pytest.raises(TypeError, match="tp_hidden_grad must be one of whole, part; got None"):
        sharding_of(None, None)
