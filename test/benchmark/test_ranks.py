"""The benchmark of a head that is cut, on two gloo ranks: every row is there, and checked first."""

import json

import torch

from benchmark import ranks

TINY = ["--device", "cpu", "--rounds", "1", "--shape", "16x8x300"]


def test_a_small_run_reports_every_call(tmp_path):
    assert ranks.main([*TINY, "--out", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / "ranks.json").read_text())
    rows = {row["name"]: row for row in saved["rows"]}
    for kind in ("overlapped", "waits", "part"):
        assert rows[f"forward + backward, {kind}"]["speed_up"] > 0
    sent = {name: row["bytes"] for name, row in rows.items() if row["bytes"] is not None}
    assert list(sent.values()) == [4 * (4 * 16 + 1), 4 * 16 * 8, 4 * 64, 64, 40_968]
    page = (tmp_path / "ranks.md").read_text()
    assert all(name in page for name in rows)


def test_waiting_leaves_the_sum_to_the_end():
    begins = ranks.PartOfHidden.start
    with ranks.added_up_late(True):
        late = ranks.PartOfHidden(ranks.Group("none such", 2))
        late.start(torch.ones(2))
    assert late.sum is None
    assert ranks.PartOfHidden.start is begins
