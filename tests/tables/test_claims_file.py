"""Invalid files of claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.errors import TableError
from evalkit.tables.claims import read_claims


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("claims: [", r"claims\.yaml, line 1: not valid YAML: "),
        ("claims: {}", r"claims\.yaml: it lacks 'models'"),
        ("models: {}\nclaims: 3", r"claims\.yaml: 'claims' is "),
        ("", r"claims\.yaml: it is "),
        ("models: {a: {model_type: bert}}\nclaims: {}", r"claims\.yaml: 'models\.a': .*bert"),
    ],
)
def test_invalid_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TableError, match=words):
        read_claims(path)
    with pytest.raises(TableError, match=r"none\.yaml cannot be read"):
        read_claims(tmp_path / "none.yaml")
