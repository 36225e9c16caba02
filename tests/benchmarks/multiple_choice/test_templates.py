"""Template files: valid ones are read, and errors of invalid ones."""

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
    assert template.parts == (
        Part("context", "{context} {{literal}}"),
        Part("continuation", "{gap}{continuation}"),
    )


def test_inst_is_the_papers_to_the_letter() -> None:
    """Appendix A.3: <bos>[INST] system [/INST] context continuation<eos>, everything scored."""
    template = load_template("inst")
    fields = {"system": template.system, "context": "C", "continuation": "D", "gap": " "}
    text = "".join(part.text.format_map(fields) for part in template.parts)
    assert text == "[INST] You are a knowledgeable assistant. Give the continuation that fits best. [/INST] C D"
    assert (template.bos, template.eos) == ("always", True)
    assert template.score == ("special", "instruction", "context", "continuation", "end")


def test_every_template_loads() -> None:
    assert {"inst", "plain", "chat"} <= set(template_names())
    for name in template_names():
        assert load_template(name).name == name


def test_hash_is_of_what_shapes_a_sequence(tmp_path: Path) -> None:
    def changed(old: str, new: str) -> str:
        return load_template(written(tmp_path, GOOD.replace(old, new))).content_hash

    same = load_template(written(tmp_path, GOOD)).content_hash
    assert changed("for this test", "renamed") == same
    for old, new in (("never", "always"), ("false", "true"), ("[continuation, context]", "[continuation]")):
        assert changed(old, new) != same
    assert changed("{gap}", "{delimiter}") != same


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{gap}{continuation}", "{gap}", r"parts\[1\]': \{continuation\} must be in the continuation"),
        (
            "{gap}{continuation}",
            "{{continuation}}",
            r"parts\[1\]': \{continuation\} must be in the continuation segment",
        ),
        ('  - continuation: "{gap}{continuation}"\n', "", r"no part has \{continuation\}"),
        ("{context} ", "{context}{continuation}", r"parts\[0\]': \{continuation\} must be in the continuation"),
        ("bos: never", "bso: never", "unknown key 'bso': did you mean 'bos'"),
        ("bos: never", "bos: sometimes", "'bos' is "),
        ("bos: never", "bos: [never]", "'bos' is "),
        ("eos: false", "eos: maybe", "'eos' is "),
        ("eos: false", "eos: 0", "'eos' is "),
        ("eos: false", "chat: 3", "'chat' is "),
        ("eos: false", "system:", "'system' is "),
        ("eos: false", "system: [a]", "'system' is "),
        ("- context:", "- contxt:", r"parts\[0\]': unknown key 'contxt': did you mean 'context'"),
        ("- context:", "- end: x\n    context:", r"parts\[0\]': a part is one 'segment: text', but this has 2"),
        ("{context} ", "{contxt} ", r"parts\[0\]': unknown field 'contxt': did you mean 'context'"),
        ("{context} ", "{} ", r"parts\[0\]': unknown field ''"),
        ("{context} ", "{context!r} ", r"parts\[0\]': .*context"),
        ("{context} ", "{context:>9} ", r"parts\[0\]': .*context"),
        ("{context} ", "{context ", r"parts\[0\]': .* write a literal brace twice"),
        ("{context} ", "} ", r"parts\[0\]': .* write a literal brace twice"),
        ("[continuation, context]", "[context]", "'score': add continuation"),
        ("[continuation, context]", "continuation", "'score' is "),
        (
            "[continuation, context]",
            "[continuation, ending]",
            r"'score\[1\]' is ",
        ),
        ('- context: "{context} {{literal}}"', "- context: 3", r"parts\[0\]\.context' is "),
        ('- context: "{context} {{literal}}"', "- context", r"parts\[0\]' is "),
        (GOOD[GOOD.index("parts:") :], "parts: []", r"no part has \{continuation\}"),
        (GOOD[GOOD.index("parts:") :], "", r"no part has \{continuation\}"),
        ("eos: false", "chat: true", "chat uses the tokenizer's chat template"),
        ("eos: false", "eos: [", "line 5: not valid YAML"),
        (GOOD, "just words", "valid dictionary"),
        (GOOD, "", "valid dictionary"),
    ],
)
def test_the_error_of_a_wrong_file_has_file_and_key(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(TemplateError, match=words) as caught:
        load_template(written(tmp_path, GOOD.replace(old, new)))
    assert "mine.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"none\.yaml does not exist"):
        load_template(str(tmp_path / "none.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"description: \xff\xfe")
    with pytest.raises(TemplateError, match=r"bytes\.yaml, line 1: expected UTF-8, found the byte 0xff"):
        load_template(str(tmp_path / "bytes.yaml"))
