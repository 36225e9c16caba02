"""The files that are generated from the settings of requests: types for type checkers, and the reference page.

`python -m tests.generated` writes them; `tests/test_settings.py` compares them with the settings.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.request import Request, SuiteRequest
from evalkit.inputs.settings import Setting, settings_of
from evalkit.models.loading.spec import ModelSpec

ROOT = Path(__file__).parents[1]
KEYWORDS = ROOT / "evalkit" / "benchmarks" / "keywords.py"
REFERENCE = ROOT / "docs" / "reference" / "settings.md"
KINDS = {
    "longbench": "`evalkit longbench`, suites longbench and longbench-e",
    "ruler": "`evalkit ruler`, suite ruler",
    "needle": "`evalkit needle`, suite needle",
    "attention": "`evalkit attention`, suite attention",
    "perplexity": "`evalkit perplexity`, suite perplexity",
    "answers": "Generated answers of your own: `evalkit run`, with `--set chat=true`",
}

_HEADER = '''"""Keywords of `evaluate`, `harness` and the training callback, for type checkers.

Generated from the settings by `python -m tests.generated`; a test compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict
'''


def keywords() -> str:
    """Return the module of types."""
    parts = (
        (
            "SuiteSettings",
            "TypedDict, total=False",
            "Settings of a run of a suite.",
            settings_of(SuiteRequest).values(),
        ),
        (
            "LoadingSettings",
            "TypedDict, total=False",
            "Settings that a model is loaded with, without the tokenizer.",
            [one for one in settings_of(ModelSpec).values() if one.name != "tokenizer"],
        ),
        ("EvaluateSettings", "SuiteSettings, LoadingSettings", "Settings of `evaluate`.", []),
    )
    classes = (
        f'\n\nclass {name}({bases}):\n    """{words}"""\n'
        + "".join(f"{'' if number else chr(10)}    {one.name}: {_type(one)}\n" for number, one in enumerate(listed))
        for name, bases, words, listed in parts
    )
    return _HEADER + "".join(classes)


def _type(one: Setting) -> str:
    """Return what a keyword may be: a path in place of its text, a list in place of a tuple."""
    found: list[str] = []
    for member in one.types:
        of = get_args(member)
        if get_origin(member) is Literal:
            found.append(f"Literal[{', '.join(repr(value) for value in of)}]".replace("'", '"'))
        elif get_origin(member) is tuple:
            each = "str | Path" if of[0] is Path else of[0].__name__
            found += ["str", *(["Path"] if one.names != "text" else []), f"Sequence[{each}]"]
        elif member is Path or (member is str and one.names != "text"):
            found += ["str", "Path"]
        else:
            found.append(member.__name__)
    if one.word and not any(get_origin(member) is Literal for member in one.types):
        found.append(f'Literal["{one.word}"]')
    return " | ".join([*found, *(["None"] if one.default is None else [])])


def reference() -> str:
    """Return the page of all settings."""
    loading, shared = settings_of(ModelSpec).values(), settings_of(Request).values()
    parts = [
        "# Settings\n\nEvery setting is an option of its command (`--num-fewshot`, or `EVALKIT_NUM_FEWSHOT` in the "
        "environment), a key of config and study files (`num_fewshot`), and a keyword of `evalkit.evaluate`, or, of a "
        "benchmark other than multiple choice, a key of its `settings`. Lists are written with commas. This page is "
        "generated from the code.\n",
        _table("The model", loading),
        _table("Every run", shared),
        _table("`evalkit run`: suites of multiple choice and lm-eval's tasks", _own(SuiteRequest, shared)),
        *(_table(words, _own(benchmark(kind).request, shared)) for kind, words in KINDS.items()),
    ]
    return "\n".join(parts)


def _own(kind: type[Request], shared: Collection[Setting]) -> list[Setting]:
    names = {one.name for one in shared}
    return [one for one in settings_of(kind).values() if one.name not in names]


def _table(title: str, listed: Iterable[Setting]) -> str:
    rows = [f"| `{one.flag}` | {_values(one)} | {_default(one)} | {_escaped(one.help)} |" for one in listed]
    return "\n".join([f"## {title}", "", "| option | value | default | |", "|---|---|---|---|", *rows, ""])


def _values(one: Setting) -> str:
    hint: Any = one.types[0]
    words = {bool: "–", int: "whole number", str: "text", Path: "path"}
    if get_origin(hint) is Literal:
        return ", ".join(get_args(hint))
    if get_origin(hint) is tuple:
        each = {int: "whole numbers", float: "numbers", str: "names", Path: "paths"}[get_args(hint)[0]]
        return f"{each}, or a file" if one.names != "text" else each
    least = f" from {one.least}" if hint is int and one.least != 1 else ""
    or_file = {"text": "", "folder": ", or a folder"}.get(one.names, ", or a file") if hint is str else ""
    return words[hint] + least + (f", or {one.word}" if one.word else "") + or_file


def _default(one: Setting) -> str:
    if one.default_text:
        return _escaped(one.default_text)
    if isinstance(one.default, tuple):
        return ",".join(f"{value:g}" for value in one.default) or "–"
    return "–" if one.default is None or one.default is False else f"`{one.default}`"


def _escaped(text: str) -> str:
    return re.sub(r"(<[a-z]+>[^ ,]*)", r"`\1`", text).replace("|", "\\|")


if __name__ == "__main__":
    KEYWORDS.write_text(keywords(), encoding="utf-8")
    REFERENCE.write_text(reference(), encoding="utf-8")
