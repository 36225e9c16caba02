"""README and docs: links resolve, commands exist, and the README is a short index."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import click
import pytest

from evalkit.cli.root import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as on GitHub."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading.lower())) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def commands(page: Path) -> list[list[str]]:
    """Return the words of each `evalkit` command on a code line, without its comment."""
    text = page.read_text(encoding="utf-8")
    shell = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^    (?:\$ )?evalkit (.*)$", text + textwrap.indent(shell, "    "), re.MULTILINE)
    return [re.split(r"\s+#|\s{3,}", line)[0].replace("[", "").replace("]", "").split() for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_and_their_options_exist(page: Path) -> None:
    for given in commands(page):
        words, command = list(given), cli
        while isinstance(command, click.Group) and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        assert command is not cli or given[:1] in ([], ["--help"]), given
        # `evalkit longbench` runs a command of its group where none is named
        members = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
        known = {option for member in members for parameter in member.params for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)} <= known, given


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    """Directly, or by the index of the pages."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 120
    assert "docs/README.md" in _LINK.findall("\n".join(lines))
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in _LINK.findall(index)}
    pages = [page for page in PAGES if page.name != "README.md"]
    assert [name(page) for page in pages if page.resolve() not in linked] == []
