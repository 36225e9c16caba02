"""Prompts: the official text, verified by its hash, with rows inserted verbatim."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.benchmarks.longbench import prompts
from evalkit.benchmarks.longbench.data import LongBenchDocument
from evalkit.benchmarks.longbench.prompts import prompt, template
from evalkit.benchmarks.longbench.protocol import TASKS
from evalkit.errors import TemplateError


def row(task: str, context: str, question: str) -> LongBenchDocument:
    return LongBenchDocument(task, "1", 0, context, question, ("a",), 1, ())


@pytest.fixture
def another_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "tasks" / "longbench"
    folder.mkdir(parents=True)
    monkeypatch.setattr(prompts, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    template.cache_clear()
    yield folder
    template.cache_clear()


@pytest.mark.parametrize("name", TASKS)
def test_every_template_is_the_official_one(name: str) -> None:
    text = template(TASKS[name])
    assert hashlib.sha256(text.encode()).hexdigest() == TASKS[name].prompt_sha256
    assert text.count("{context}") == 1
    without_input = name in ("gov_report", "multi_news", "passage_count", "lcc")
    assert text.count("{input}") == (0 if without_input else 1)


def test_the_official_peculiarities_are_kept() -> None:
    assert "asconcisely" in template(TASKS["narrativeqa"])
    assert template(TASKS["passage_count"])[-1] == " "
    assert template(TASKS["passage_retrieval_en"])[-1] == " "
    assert template(TASKS["lcc"])[-1] == "\n"
    assert template(TASKS["repobench-p"])[-1] == "\n"
    assert template(TASKS["samsum"]).endswith("{context}\n\n{input}")


@given(st.text(alphabet="{}contexipu \\n%"), st.text(alphabet="{}contexipu \\n%"))
def test_rows_stand_in_the_prompt_as_they_are(context: str, question: str) -> None:
    before, _, rest = template(TASKS["hotpotqa"]).partition("{context}")
    between, _, after = rest.partition("{input}")
    found = prompt(TASKS["hotpotqa"], row("hotpotqa", context, question))
    assert found == before + context + between + question + after


def test_a_field_in_a_document_is_not_filled() -> None:
    assert "print(f'{input} {context}')" in prompt(TASKS["lcc"], row("lcc", "print(f'{input} {context}')", "no"))


def test_another_lm_eval_is_reported(another_lm_eval: Path) -> None:
    (another_lm_eval / "trec.yaml").write_text('process_results: !function metrics.x\ndoc_to_text: "{{context}} new"')
    with pytest.raises(TemplateError, match=r"trec\.yaml: the prompt for trec is not the official one .*0\.4\.13"):
        template(TASKS["trec"])


@pytest.mark.parametrize("content", [None, "a: [", "other: 1", "7", b"\xff\xfe"])
def test_an_unreadable_task_file_is_reported(another_lm_eval: Path, content: str | bytes | None) -> None:
    if content is not None:
        (another_lm_eval / "trec.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TemplateError, match=r"trec\.yaml.*install lm-eval 0\.4\.13"):
        template(TASKS["trec"])


def test_a_missing_lm_eval_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "find_spec", lambda _: None)
    template.cache_clear()
    with pytest.raises(TemplateError, match="not installed"):
        template(TASKS["trec"])
