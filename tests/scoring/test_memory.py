"""Scoring MMLU needs little memory beyond the model's own, and freed memory is reused; in processes of their own."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

MMLU = """
import json, sys, threading, time
from pathlib import Path
import psutil
from evalkit.benchmarks.multiple_choice.prompts import EncodedQuestions
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.suites import choose_tasks, load_suite
from evalkit.benchmarks.multiple_choice.tasks import load_questions
from evalkit.benchmarks.multiple_choice.templates import load_template
from evalkit.data import Library
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.scoring.architecture import auto_budget
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import plan

loaded = load(locate(sys.argv[1]), device="cpu", dtype="float32")
process = psutil.Process()
before, peak = process.memory_info().rss, 0

def watch():
    global peak
    while True:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.005)

threading.Thread(target=watch, daemon=True).start()
questions = load_questions(choose_tasks(load_suite("zeroshot8"), ("mmlu",)), Library(Path(sys.argv[2])))["mmlu"]
prompter = Prompter(load_template("inst"), loaded.tokenizer, loaded.window)
sequences = EncodedQuestions.of(prompter.encode(questions), frozenset(range(5))).sequences
engine = Engine(loaded.model, auto_budget(loaded.model), print)
batches = [planned.of(sequences) for planned in plan(sequences, engine.budget)]
for batch in sorted(batches, key=lambda batch: len(batch.tree.tokens) + len(batch.trunk))[-4:]:
    engine.score(batch)
print(json.dumps([len(questions), peak - before]))
"""

FAULTS = """
import resource, sys
import torch
from evalkit.models.memory import keep_freed_blocks

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(6 * 2**20, dtype=torch.uint8) for _ in range(8)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    keep_freed_blocks()
faults()  # the first use of any memory
print(faults() + faults())
"""

pytestmark = pytest.mark.slow


def printed(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_reused_without_page_faults() -> None:
    """Eight blocks as large as a layer's states, 48 MiB."""
    returned = int(printed(FAULTS, "returned"))
    if returned < 2000:
        pytest.skip("this system does not take the memory back, or has huge pages")
    # A block or two may be added to the heap in the second round, where the first ones lie apart
    assert int(printed(FAULTS, "kept")) < returned / 2


def test_the_whole_mmlu_needs_little_memory(demo: Path, shared_data: Path) -> None:
    """All documents encoded and planned, the largest batches scored."""
    documents, peak = json.loads(printed(MMLU, demo, shared_data / "zeroshot8"))
    assert documents == 14042 and peak <= 2**30
