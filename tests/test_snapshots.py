"""Behaviour seen from outside, frozen: tests/snapshots has transcripts of every command, in every format and outcome.

Each file there lists commands with their exit code, standard output and written files (tests/transcripts.py). The test
runs them again in a new process and compares. Numbers with five significant digits or more, such as log-likelihoods,
may differ by 1e-5 relative, or in their last digit, since machines round differently; all else must be equal.

    EVALKIT_SNAPSHOTS=update pytest tests/test_snapshots.py

rewrites the transcripts: after an intended change, and after adding a line `$ evalkit …` to a transcript.

    EVALKIT_SNAPSHOTS_EXACT=FOLDER pytest tests/test_snapshots.py

compares two commits on one machine bit for bit: the first writes all digits and the ids of runs into the new folder,
and the second must have the same.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.transcripts import ROOT, blocks

SNAPSHOTS = ROOT / "tests" / "snapshots"
NAMES = sorted(path.name for path in SNAPSHOTS.glob("[0-9]*.txt"))
UPDATE = os.environ.get("EVALKIT_SNAPSHOTS") == "update"
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[+-]?\d+)?(?![\w.])|(?<![\w.])-?\d+e[+-]?\d+(?![\w.])")
RELATIVE = 1e-5
ABSOLUTE = 1e-5
"""Of small numbers, such as differences of log-likelihoods."""


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the transcripts of this commit, written by one process of the session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "transcripts"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            write_transcripts(folder.with_suffix(".unfinished"))
            folder.with_suffix(".unfinished").rename(folder)
    return folder


def write_transcripts(folder: Path) -> None:
    work = folder / "work"
    (work / "home").mkdir(parents=True)
    fixed = {"HOME": work / "home", "EVALKIT_CACHE": work / "home" / "evalkit", "PYTHONPATH": ROOT, "HF_HUB_OFFLINE": 1,
             "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": 100, "LINES": 40, "TZ": "UTC",
             "LC_ALL": "C.UTF-8", "PYTHONUTF8": 1, "TERM": "dumb", "PATH": os.environ.get("PATH", "")}  # fmt: skip
    command = [sys.executable, "-m", "tests.transcripts", folder, *(SNAPSHOTS / name for name in NAMES)]
    environment = {name: str(value) for name, value in fixed.items()}
    done = subprocess.run(list(map(str, command)), cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_transcript(name: str, new: Path) -> None:
    found, path = rounded((new / name).read_text(encoding="utf-8")), SNAPSHOTS / name
    assert "unexpected error" not in found
    if UPDATE:
        path.write_text(found, encoding="utf-8")
    wrong = [
        "".join(difflib.unified_diff(*(text.splitlines(keepends=True) for text in (old.text, now.text)), n=1))
        for old, now in zip(blocks(path.read_text(encoding="utf-8")), blocks(found), strict=True)
        if not alike(old.text, now.text)
    ]
    assert not wrong, f"{len(wrong)} commands of {name} differ:\n\n" + "\n".join(wrong)


def test_the_python_interface(new: Path) -> None:
    found, path = (new / "python.txt").read_text(encoding="utf-8"), SNAPSHOTS / "python.txt"
    if UPDATE:
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


@pytest.mark.skipif("EVALKIT_SNAPSHOTS_EXACT" not in os.environ, reason="EVALKIT_SNAPSHOTS_EXACT is not set")
@pytest.mark.parametrize("name", [*NAMES, "ids.txt"])
def test_bit_for_bit(name: str, new: Path) -> None:
    path = Path(os.environ["EVALKIT_SNAPSHOTS_EXACT"]) / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(new / name, path)
    texts = [file.read_text(encoding="utf-8").splitlines() for file in (path, new / name)]
    differences = list(difflib.unified_diff(*texts, n=0, lineterm=""))
    assert not differences, "\n".join(differences[:100])


def test_every_command_has_its_help() -> None:
    helps = {block.command: block.text for block in blocks((SNAPSHOTS / "40_help.txt").read_text(encoding="utf-8"))}
    for command, text in helps.items():
        for name in re.findall(r"^  (\w+)", text.partition("\nCommands:\n")[2], re.MULTILINE):
            assert f"{command.removesuffix('--help')}{name} --help" in helps


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a -12.3456789", "a -12.3456788", True),
        ("a -12.3456789", "a -12.3468134", False),
        ("a 41.2", "a 41.3", False),
        ("a 41.2", "b 41.2", False),
        ("12.34", "12.35", False),
        ("3466.03", "3466.02", True),
        ("exit 0", "exit 1", False),
        ("0.0 1.00000000", "-1e-09 1.0", True),
    ],
)
def test_comparison(one: str, other: str, expected: bool) -> None:
    assert alike(one, other) is expected


def rounded(text: str) -> str:
    """Return a text with its numbers rounded to nine significant digits, so that transcripts seldom change."""
    return NUMBER.sub(lambda found: repr(float(f"{float(found[0]):.9g}")) if _precise(found[0]) else found[0], text)


def alike(one: str, other: str) -> bool:
    """Whether texts are equal but for rounding."""
    if NUMBER.split(one) != NUMBER.split(other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(a == b or ((_precise(a) or _precise(b)) and _close(a, b)) for a, b in pairs)


def _close(one: str, other: str) -> bool:
    """Whether precise numbers are equal but for rounding, when computed and when printed."""
    unit = max(10.0 ** -len(number.partition(".")[2]) if "e" not in number else 0.0 for number in (one, other))
    printed = min(1.01 * unit, 2e-4 * abs(float(one)))
    return math.isclose(float(one), float(other), rel_tol=RELATIVE, abs_tol=max(ABSOLUTE, printed))


def _precise(number: str) -> bool:
    """Whether a number has more digits than tables have, whose numbers must be equal."""
    return "e" in number or len(number.replace(".", "").lstrip("-0")) >= 5
