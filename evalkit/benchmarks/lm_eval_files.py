"""lm-eval's files in a run folder, written and read: `results_<time>.json` and, on request, `samples_….jsonl`.

In: evaluation results, in the entries that lm-eval's `evaluate` returns. Out: files with the keys that lm-eval 0.4.13
writes, so that tools for its output can read them, and an entry "evalkit". A task's alias, which lm-eval's tables
print, says if its documents are not the official ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.document_views import ChoiceText, DocumentKey, choice_text
from evalkit.compatibility.lm_eval import json_value
from evalkit.inputs.reading import parse_json
from evalkit.runs.folder import Run, json_bytes
from evalkit.runs.traits import caveats, unofficial
from evalkit.suites.templates import Piece

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.runs.writing import RunWriter


@dataclass(frozen=True)
class Evaluated:
    entries: Mapping[str, Any]
    """Of `evaluate`: results, groups, group_subtasks, configs, versions, n-shot, higher_is_better, n-samples."""
    settings: Mapping[str, Any]
    """Further keys of the entry "config", beside the model's."""
    seconds: float
    samples: Mapping[str, Iterable[Mapping[str, Any]]] = field(default_factory=dict)
    """Task → its documents in the form of lm-eval's sample files; empty where they are not requested."""
    documents: Mapping[str, str] = field(default_factory=dict)
    """Task → name of its documents in the manifest, where it is not the task's."""
    hashes: Mapping[str, str] | None = None
    """Task → lm-eval's hash of its requests, where lm-eval itself evaluated."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the entry "evalkit"."""


def write_lm_eval(writer: RunWriter, evaluated: Evaluated) -> None:
    """Write the files into the run folder's `lm_eval/`, named after the time the run was created."""
    stamp = datetime.fromisoformat(writer.manifest["created"]).strftime("%Y-%m-%dT%H-%M-%S.%f")
    # lm-eval's own conversion of values that JSON does not support
    as_lm_eval = partial(json_bytes, default=json_value)
    manifest, by_lm_eval = writer.manifest, evaluated.hashes is not None
    loaded = manifest.get("loaded", {})
    content = {
        **_with_caveats(evaluated, manifest),
        "config": {
            "model": "evalkit",
            "model_args": {"pretrained": manifest["model"], "dtype": loaded.get("dtype")},
            "model_num_parameters": loaded.get("parameters"),
            "model_dtype": loaded.get("dtype"),
            **evaluated.settings,
        },
        **({"task_hashes": evaluated.hashes} if by_lm_eval else {}),
        "max_length": loaded.get("window"),
        "date": datetime.fromisoformat(manifest["created"]).timestamp(),
        "transformers_version": manifest["versions"]["transformers"],
        "lm_eval_version": manifest["versions"]["lm-eval"],
        **({"model_source": "evalkit"} if by_lm_eval else {}),
        "model_name": manifest["model"],
        "total_evaluation_time_seconds": f"{evaluated.seconds:.3f}",
        # What lm-eval's format does not include
        "evalkit": {
            "run": manifest["id"],
            "unofficial": unofficial(manifest),
            "context_extension": manifest["specification"]["context_extension"],
            # lm-eval has no random samples
            **{key: value for key, value in manifest["specification"].items() if key in ("sample", "seed")},
            **evaluated.about,
        },
    }
    writer.save_bytes(f"lm_eval/results_{stamp}.json", as_lm_eval(content, indent=2) + b"\n")
    for task, lines in evaluated.samples.items():
        writer.save_bytes(f"lm_eval/samples_{task}_{stamp}.jsonl", b"".join(as_lm_eval(line) + b"\n" for line in lines))


def _with_caveats(evaluated: Evaluated, manifest: Mapping[str, Any]) -> dict[str, Any]:
    entries = dict(evaluated.entries)
    for kind in entries.keys() & {"results", "groups"}:
        entries[kind] = dict(entries[kind])
        for name, entry in entries[kind].items():
            if notes := caveats_below(name, entries["group_subtasks"], manifest, evaluated.documents):
                entries[kind][name] = entry | {"alias": f"{entry['alias']} ({'; '.join(notes)})"}
    return entries


def caveats_below(
    name: str, groups: Mapping[str, Sequence[str]], manifest: Mapping[str, Any], documents: Mapping[str, str] = {}
) -> list[str]:
    """Return the distinct caveats of a task, or of a group and all its members; `documents` as of `Evaluated`."""
    notes = caveats(manifest).get(documents.get(name, name), [])
    for member in groups.get(name, ()):
        notes += caveats_below(member, groups, manifest, documents)
    return list(dict.fromkeys(notes))


def texts_of_requests(arguments: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each request in a line of a sample file. A chat for an API is a list of its only text."""
    for number in range(len(arguments)):
        parts = arguments[f"gen_args_{number}"].values()
        texts = (part[0] if isinstance(part, list) and len(part) == 1 else part for part in parts)
        yield tuple(text for text in texts if isinstance(text, str))


NO_SAMPLES = "the run has no sample files, which store the texts; repeat its command with --log-samples"


def stored_texts(run: Run, table: pd.DataFrame) -> dict[DocumentKey, ChoiceText]:
    """Return the texts of a task's documents, in its rows of the score table, from the run's sample files, if any."""
    texts: dict[DocumentKey, ChoiceText] = {}
    for subtask, rows in table[table["choice"] == 0].groupby("subtask", sort=False):
        choices = dict(zip(rows["doc_id"].tolist(), rows["choices"].tolist(), strict=True))
        for sample in samples_of(run, str(subtask)):
            # For tasks that measure mutual information, lm-eval appends the choices without their context
            pairs = list(islice(texts_of_requests(sample["arguments"]), choices.get(sample["doc_id"], 0)))
            options = [continuation.strip() for _, continuation in pairs]
            sequences = [pieces_of(*pair) for pair in pairs]
            texts.setdefault((str(subtask), sample["doc_id"]), choice_text(sequences, options))
    return texts


def pieces_of(context: str, continuation: str) -> tuple[Piece, ...]:
    both = (Piece("context", context), Piece("continuation", continuation))
    return tuple(piece for piece in both if piece.text)


def samples_of(run: Run, task: str) -> Iterator[dict[str, Any]]:
    pattern = re.compile(rf"lm_eval/samples_{re.escape(task)}_\d{{4}}-[\dT.-]+\.jsonl")
    for name in filter(pattern.fullmatch, run.files):
        for line in run.read(name).splitlines():
            yield parse_json(line)
