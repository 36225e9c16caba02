"""Scoring MMLU needs little memory beyond the model's own; freed memory is reused without page faults."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint

MOST = 2**30

SCRIPT = """
import json, sys, threading, time
from pathlib import Path

import psutil

from evalkit.data import Library
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.scoring.architecture import auto_budget
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import batches_of
from evalkit.benchmarks.multiple_choice.encoded import question_sequences
from evalkit.benchmarks.multiple_choice.suites import choose_tasks, load_suite
from evalkit.benchmarks.multiple_choice.tasks import load_questions
from evalkit.benchmarks.multiple_choice.templates import SEGMENTS, load_template

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
encoded = list(Prompter(load_template("inst"), loaded.tokenizer, loaded.window).encode(questions))
engine = Engine(loaded.model, auto_budget(loaded.model), print)
scored = frozenset(range(len(SEGMENTS)))
batches = batches_of(question_sequences(encoded, scored), engine.budget)
planned = peak
for batch in sorted(batches, key=lambda batch: len(batch.tree.tokens) + len(batch.trunk))[-4:]:
    engine.score(batch)
done = True
watcher.join()
print(json.dumps([len(questions), len(batches), planned - before, peak - before]))
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


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_reused_without_page_faults() -> None:
    """Eight blocks as large as a layer's states, 48 MiB. Processes of their own, since the setting lasts."""

    def faults(way: str) -> int:
        command = [sys.executable, "-c", FAULTS, way]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    returned = faults("returned")
    if returned < 2000:
        pytest.skip("this system does not take the memory back, or has huge pages")
    # A block or two may be added to the heap in the second round, where the first ones lie apart
    assert faults("kept") < returned / 2


KERNELS = """
import os, sys

import psutil
import torch

from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate

if sys.argv[2] == "kept":
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = os.environ["LRU_CACHE_CAPACITY"] = "1024"
load(locate(sys.argv[1]), device="cpu", dtype="bfloat16")
before = psutil.Process().memory_info().rss
weight = torch.zeros(1024, 576, dtype=torch.bfloat16)
for length in range(1, 600):
    torch.nn.functional.linear(torch.zeros(length, 576, dtype=torch.bfloat16), weight)
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.slow
def test_few_kernels_of_bfloat16_products_are_kept(tmp_path: Path) -> None:
    """Batches have hundreds of lengths, and each has its kernels."""
    tiny_checkpoint(tmp_path / "model")

    def grown(way: str) -> int:
        command = [sys.executable, "-c", KERNELS, str(tmp_path / "model"), way]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    kept = grown("kept")
    if kept < 150 * 2**20:
        pytest.skip("products of this CPU are not compiled for their shape")
    assert grown("default") < kept / 3


@pytest.mark.slow
def test_the_whole_mmlu_needs_little_memory(demo: Path, shared_data: Path) -> None:
    """All documents encoded and planned, the largest batches scored. In a process of its own, to start from nothing."""
    command = [sys.executable, "-c", SCRIPT, str(demo), str(shared_data / "zeroshot8")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    documents, batches, planned, peak = json.loads(output.splitlines()[-1])
    print(f"{batches} batches; {planned / 2**20:.0f} MiB to plan, {peak / 2**20:.0f} MiB in all, above the model")
    assert documents == 14042
    assert peak <= MOST
