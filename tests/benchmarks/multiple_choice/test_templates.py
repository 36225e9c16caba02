"""Template files: valid ones are read, and errors of invalid ones name file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.benchmarks.multiple_choice.templates import Part, load_template, template_names
from evalkit.errors import TemplateError

GOOD = """\
description: for this test
bos: never
eos: false
score: [continuation, context]
parts:
  - context: "{context} {{literal}}"
  - continuation: "{gap}{continuation}"
"""


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_users_file(tmp_path: Path) -> None:
    template = load_template(written(tmp_path, GOOD))
    assert (template.name, template.bos, template.eos, template.system) == ("mine", "never", False, "")
    assert template.score == ("context", "continuation")
    texts = {"context": "{context} {{literal}}", "continuation": "{gap}{continuation}"}
    assert template.parts == tuple(Part(*part) for part in texts.items())


def test_inst_is_the_papers_to_the_letter() -> None:
    """Appendix A.3: <bos>[INST] system [/INST] context continuation<eos>, everything scored."""
    template = load_template("inst")
    fields = {"system": template.system, "context": "C", "continuation": "D", "gap": " "}
    text = "".join(part.text.format_map(fields) for part in template.parts)
    assert text == "[INST] You are a knowledgeable assistant. Give the continuation that fits best. [/INST] C D"
    assert (template.bos, template.eos) == ("always", True)
    assert template.score == ("special", "instruction", "context", "continuation", "end")
    assert all(load_template(name).name == name for name in template_names())


def test_the_hash_is_of_what_shapes_a_sequence(tmp_path: Path) -> None:
    def changed(old: str, new: str) -> str:
        return load_template(written(tmp_path, GOOD.replace(old, new))).content_hash

    assert changed("for this test", "renamed") == changed("", "")
    changes = {"never": "always", "false": "true", "[continuation, context]": "[continuation]", "{gap}": "{delimiter}"}
    assert len({changed("", ""), *(changed(old, new) for old, new in changes.items())}) == 5


@pytest.mark.parametrize(
    ("old", "new", "noun"),
    [
        ("{gap}{continuation}", "{{continuation}}", r"parts\[1\]"),
        ('  - continuation: "{gap}{continuation}"\n', "", r"\{continuation\}"),
        ("{context} ", "{context}{continuation}", r"parts\[0\]"),
        ("bos: never", "bso: never", "'bso'.* 'bos'"),
        ("eos: false", "eos: 0", "'eos'"),
        ("- context:", "- end: x\n    context:", r"parts\[0\]"),
        ("{context} ", "{contxt} ", "contxt.* 'context'"),
        ("{context} ", "{context!r} ", r"parts\[0\]"),
        ("{context} ", "{context ", r"parts\[0\]"),
        ("[continuation, context]", "[context]", "'score'"),
        ("eos: false", "chat: true", "chat"),
    ],
)
def test_the_error_of_an_invalid_file(tmp_path: Path, old: str, new: str, noun: str) -> None:
    assert old in GOOD
    with pytest.raises(TemplateError, match=noun) as caught:
        load_template(written(tmp_path, GOOD.replace(old, new)))
    assert "mine.yaml" in str(caught.value)
