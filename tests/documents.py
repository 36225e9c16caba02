"""Small folders for `--data-dir`: made-up documents of the eight tasks, and the first of the real ones.

Both are unofficial by their count, so a run on them needs `--allow-unofficial-data`.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from evalkit.data import subjects
from tests.data.samples import sample, write
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
SUBJECTS = tuple(subjects())
_WORDS = " ".join(TRAINING_TEXT[:6]).replace("?", "").replace("_", "").split()


def made_up(folder: Path, count: int = 6) -> Path:
    """A folder with `count` made-up documents of each task, of MMLU one of each subject; the same ones everywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        dice = random.Random(task)
        number = len(SUBJECTS) if task == "mmlu" else count
        write(folder, task, *(_record(task, place, dice) for place in range(number)))
    return folder


def first_real(folder: Path, source: Path, count: int) -> Path:
    """A folder with the first `count` real documents of each task; of MMLU two of each subject, and its examples."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        # By line feeds only: some documents hold other characters that splitlines() takes for line ends
        lines = (source / f"{task}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        if task == "mmlu":
            by_subject = {
                subject: [line for line in lines if f'"subject": "{subject}"' in line] for subject in SUBJECTS
            }
            lines = [line for chosen in by_subject.values() for line in chosen[:2]]
        else:
            lines = lines[:count]
        (folder / f"{task}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    shutil.copy(source.parent / "extra" / "mmlu_dev.jsonl", folder)
    return folder


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
    """Put other text, or a record with some fields changed (None: left out), in a line of a JSON lines file."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if isinstance(change, dict):
        record = json.loads(lines[line - 1]) | change
        change = json.dumps({key: value for key, value in record.items() if value is not None})
    lines[line - 1] = change
    path.write_text("\n".join(lines), encoding="utf-8")
