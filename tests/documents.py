"""Small folders for `--data-dir`: made-up documents of the eight tasks, and official ones of seven.

Both are unofficial by their count, so a run on them needs `--allow-unofficial-data`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from evalkit.data import SUBJECTS
from tests.data.samples import sample, write
from tests.fixtures import unpacked
from tests.tiny import TRAINING_TEXT

COUNTS = {
    "winogrande": 1267,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "hellaswag": 10042,
    "piqa": 1838,
    "openbookqa": 500,
    "boolq": 3270,
    "mmlu": 14042,
}
"""Documents of the official splits, as lm-eval 0.4.13 has them."""
TASKS = tuple(COUNTS)
_WORDS = " ".join(TRAINING_TEXT[:6]).replace("?", "").replace("_", "").split()


def made_up(folder: Path, count: int = 6) -> Path:
    """Write `count` synthetic documents of each task, for MMLU one of each subject, deterministically."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        dice = random.Random(task)
        number = len(SUBJECTS) if task == "mmlu" else count
        write(folder, task, *(_record(task, place, dice) for place in range(number)))
    return folder


def official(folder: Path) -> Path:
    """A folder with a few official documents of each task (OpenBookQA's are made up), and MMLU's official examples."""
    return unpacked("zeroshot8", made_up(folder))


def _record(task: str, place: int, dice: random.Random) -> dict[str, Any]:
    def words(most: int) -> str:
        return " ".join(dice.choices(_WORDS, k=dice.randint(1, most)))

    gold = dice.randrange(2 if task in ("winogrande", "piqa", "boolq") else 3)
    if task == "winogrande":
        changes: dict[str, Any] = {"sentence": f"{words(9)} _ {words(6)}", "option1": words(2), "option2": words(2)}
        changes["answer"] = str(gold + 1)
    elif task in ("arc_easy", "arc_challenge", "openbookqa"):
        choices = 4 if task == "openbookqa" else 3 + place % 3
        letters = list("ABCDE"[:choices])
        changes = {"choices": {"text": [words(5) for _ in letters], "label": letters}, "answerKey": letters[gold]}
        changes["question_stem" if task == "openbookqa" else "question"] = words(12)
    elif task == "hellaswag":
        changes = {"ctx_a": words(12), "endings": [words(8) for _ in range(4)], "label": str(gold)}
    elif task == "piqa":
        changes = {"goal": words(8), "sol1": words(9), "sol2": words(9), "label": gold}
    elif task == "boolq":
        changes = {"passage": words(40), "question": words(6), "answer": bool(gold)}
    else:
        changes = {"subject": SUBJECTS[place], "question": words(12), "choices": [words(3) for _ in range(4)]}
        changes["answer"] = gold
    return sample(task, **changes)


def rewrite(path: Path, line: int, change: str | dict[str, Any]) -> None:
    """Replace a line of a JSON lines file by another text, or by a record with changed fields (None: removed)."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if isinstance(change, dict):
        record = json.loads(lines[line - 1]) | change
        change = json.dumps({key: value for key, value in record.items() if value is not None})
    lines[line - 1] = change
    path.write_text("\n".join(lines), encoding="utf-8")
