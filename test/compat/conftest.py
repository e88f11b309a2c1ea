"""Other packages' warnings about each other are not ours to mend."""

from pathlib import Path

import pytest

from distributed.conftest import processes, ranks  # noqa: F401

THEIRS = ("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for warning in THEIRS:
                item.add_marker(pytest.mark.filterwarnings(warning))
