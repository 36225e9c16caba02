"""Fixtures of the tests with real words."""

from __future__ import annotations

import pytest

from evalkit.benchmarks.attention.categories import Tagger, load_tagger
from evalkit.errors import EvalkitError


@pytest.fixture(scope="session")
def tagger() -> Tagger:
    """spaCy's English model, in the user's own cache. For slow tests."""
    try:
        return load_tagger(lambda _: None)
    except EvalkitError as error:
        pytest.skip(str(error))
