"""What one rank's tokens cannot say of themselves, and the other ranks' votes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ratio_kl.distributed.groups import Group
from ratio_kl.objective.sequences import Padded
from ratio_kl.objective.surrogate import _of_sequence


class BesideAnother(Padded):
    """Two sequences of one token here; of the other rank's part `other` is what it sends."""

    other = torch.zeros(3)

    def over_ranks(self, parts: Tensor) -> Tensor:
        return parts + self.other


@pytest.mark.parametrize(
    ("vote", "expected"),
    [
        (1.0, [0.3, 0.5]),  # it has one entry a token, so these are the tokens' too: their sum
        (0.0, [0.3, 0.5]),  # nobody can tell
        (-1.0, [0.1, 0.2]),  # one a sequence: the entries are what they are
    ],
)
def test_entries_that_could_be_a_tokens_or_a_sequences(vote: float, expected: list[float]) -> None:
    layout = replace(BesideAnother((2, 1)), ranks=Group("another", 2))
    object.__setattr__(layout, "other", torch.tensor([0.2, 0.3, vote]))
    tokens = SimpleNamespace(layout=layout, sampling_ratio_reading="either")
    found = _of_sequence(torch.tensor([[0.1], [0.2]]), tokens)  # type: ignore[arg-type]
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-6)
