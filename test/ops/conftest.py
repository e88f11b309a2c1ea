"""Settings of the operators' tests."""

from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True)
def no_head_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a test's size all rows would be computed in pass 2; here those without a gradient are left
    out, as at sizes that matter. Tests of small heads say so."""
    if find_spec("triton") is not None:
        from ratio_kl.ops.triton import gradients as triton_gradients

        monkeypatch.setattr(triton_gradients, "SMALL", 0)
