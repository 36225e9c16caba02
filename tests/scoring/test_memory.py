"""Scoring MMLU needs little memory beyond the model's own; freed memory is reused. In processes of their own."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint

MOST = 2**30

MMLU = """
import json, sys, threading, time
from pathlib import Path
import psutil
from evalkit.benchmarks.multiple_choice.encoded import EncodedQuestions
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
before, peak, done = process.memory_info().rss, 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.005)

watcher = threading.Thread(target=watch)
watcher.start()
questions = load_questions(choose_tasks(load_suite("zeroshot8"), ("mmlu",)), Library(Path(sys.argv[2])))["mmlu"]
prompter = Prompter(load_template("inst"), loaded.tokenizer, loaded.window)
encoded = EncodedQuestions.of(questions, prompter.encode(questions))
engine = Engine(loaded.model, auto_budget(loaded.model), print)
sequences = encoded.sequences(frozenset(range(5)))
batches = [planned.of(sequences) for planned in plan(sequences, engine.budget)]
for batch in sorted(batches, key=lambda batch: len(batch.tree.tokens) + len(batch.trunk))[-4:]:
    engine.score(batch)
done = True
watcher.join()
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

KERNELS = """
import os, sys
import psutil
import torch
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate

if sys.argv[1] == "kept":
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = os.environ["LRU_CACHE_CAPACITY"] = "1024"
load(locate(sys.argv[2]), device="cpu", dtype="bfloat16")
before = psutil.Process().memory_info().rss
weight = torch.zeros(1024, 576, dtype=torch.bfloat16)
for length in range(1, 600):
    torch.nn.functional.linear(torch.zeros(length, 576, dtype=torch.bfloat16), weight)
print(psutil.Process().memory_info().rss - before)
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


def test_few_kernels_of_bfloat16_products_are_kept(tmp_path: Path) -> None:
    """Batches have hundreds of lengths, and each has its kernels."""
    tiny_checkpoint(tmp_path / "model")
    kept = int(printed(KERNELS, "kept", tmp_path / "model"))
    if kept < 150 * 2**20:
        pytest.skip("products of this CPU are not compiled for their shape")
    assert int(printed(KERNELS, "default", tmp_path / "model")) < kept / 3


def test_the_whole_mmlu_needs_little_memory(demo: Path, shared_data: Path) -> None:
    """All documents encoded and planned, the largest batches scored."""
    documents, peak = json.loads(printed(MMLU, demo, shared_data / "zeroshot8"))
    print(f"{peak / 2**20:.0f} MiB above the model")
    assert documents == 14042
    assert peak <= MOST
