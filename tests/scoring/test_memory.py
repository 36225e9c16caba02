"""Scoring MMLU needs little memory beyond the model's own; in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MMLU = """
import json, resource, sys
from pathlib import Path
import psutil
from evalkit.requests.encoded import EncodedDocuments
from evalkit.requests.requests import Encoder, Facts
from evalkit.suites.choice_requests import ChoiceRequests
from evalkit.suites.suites import choose_tasks, load_suite
from evalkit.suites.question_loading import load_questions
from evalkit.suites.templates import load_template
from evalkit.data import Library
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.scoring.architecture import auto_budget
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import plan

loaded = load(locate(sys.argv[1]), device="cpu", dtype="float32")
before = psutil.Process().memory_info().rss
questions = load_questions(choose_tasks(load_suite("zeroshot8"), ("mmlu",)), Library(Path(sys.argv[2])))["mmlu"]
asked = ChoiceRequests("mmlu", load_template("inst"), questions, "", ())
sequences = EncodedDocuments.of(asked.scored(Encoder(loaded.tokenizer, Facts(loaded.window)))).sequences
engine = Engine(loaded.model, auto_budget(loaded.model), print)
batches = [planned.of(sequences) for planned in plan(sequences, engine.budget)]
for batch in sorted(batches, key=lambda batch: len(batch.tree.tokens) + len(batch.trunk))[-4:]:
    engine.score(batch)
print(json.dumps([len(questions), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""


@pytest.mark.slow
def test_the_whole_mmlu_needs_little_memory(demo: Path, shared_data: Path) -> None:
    """All documents encoded and planned, the largest batches scored."""
    command = [sys.executable, "-c", MMLU, str(demo), str(shared_data / "zeroshot8")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    documents, peak = json.loads(done.stdout.splitlines()[-1])
    assert documents == 14042 and peak <= 2**30
