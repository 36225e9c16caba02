"""The replication's text: its division into training and held-out documents, and errors."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from evalkit.errors import DataError

CORPORA = Path(__file__).parents[3] / "shared" / "data" / "corpora"


def test_documents_are_divided_by_their_ids(collect_text: ModuleType) -> None:
    documents = [(f"document {number}", "text") for number in range(3200)] + [("empty", " \n")]
    train, held_out = collect_text.divided(documents)
    assert {*train, *held_out} == set(documents[:-1])
    assert not {*train} & {*held_out}
    # 200 expected, with a standard deviation of 14
    assert 150 <= len(held_out) <= 250
    assert collect_text.divided(documents[::-1])[1] == held_out[::-1]


def test_articles_begin_at_their_titles(collect_text: ModuleType) -> None:
    text = " \n = One title = \n\n A <unk> , well @-@ known . \n\n = = Part = = \n\n more \n = Other = \n text \n"
    assert collect_text.articles(text) == [
        ("One title", "= One title =\n\nA …, well-known.\n\n== Part ==\n\nmore"),
        ("Other", "= Other =\ntext"),
    ]


def test_another_file_is_an_error(collect_text: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"openstax_cc-by\.jsonl: cannot be read"):
        collect_text.read(tmp_path, "openstax_cc-by.jsonl")
    (tmp_path / "openstax_cc-by.jsonl").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="not the replication's file"):
        collect_text.read(tmp_path, "openstax_cc-by.jsonl")


@pytest.mark.skipif(not CORPORA.is_dir(), reason="the corpora are not here")
def test_the_real_articles(collect_text: ModuleType) -> None:
    found = collect_text.articles(collect_text.read(CORPORA, "wikitext-2/wiki.test.tokens"))
    # 60 articles; two formulas look like titles and divide theirs
    assert len(found) == 62
    assert all(text.startswith("= ") and "<unk>" not in text for _, text in found)
