"""What tests of every room share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real documents beside the checkout; it is not part of the project."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared folder with the real documents is not beside this checkout")
    return folder
