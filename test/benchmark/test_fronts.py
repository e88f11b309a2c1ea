"""The fronts' host time is measured against calls that answer at once."""

from benchmark import fronts
from ratio_kl.compat import verl


def test_it_prints_a_line_for_each_front(monkeypatch, capsys):
    monkeypatch.setattr(fronts, "CALLS", 20)
    kept = verl.linear_logprob
    fronts.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    for line in lines[1:]:
        assert 0 < float(line.split()[-1]) < 10_000, line
    assert verl.linear_logprob is kept
