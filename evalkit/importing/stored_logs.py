"""Run folders of imported logs: a new folder once, with a copy of the log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.benchmarks.base import Say
from evalkit.importing.log_files import LoggedTask, lines_of
from evalkit.importing.log_lines import LoggedSample, part_of_request
from evalkit.importing.manifests import short_name
from evalkit.inputs.reading import parse_json
from evalkit.runs.folder import Run, folder_name, load_run
from evalkit.runs.seal import json_bytes
from evalkit.runs.writing import RunWriter, find_finished, open_run


@dataclass(frozen=True)
class Import:
    """Settings of an import."""

    model: str
    """Name of the evaluated model."""
    output: Path
    """Parent folder of the run folders."""


def written_once(
    request: Import,
    names: tuple[str, str],
    manifest: dict[str, Any],
    finish: Callable[[RunWriter], None],
    say: Say,
) -> Run:
    """Return the run of a manifest; write it if it does not exist.

    Args:
        request: the import.
        names: suite and template, for the folder's name.
        manifest: the run's manifest.
        finish: writes its files, the results last.
        say: called with messages for the user.

    Raises:
        RunError: the folder cannot be written, or it is damaged.
    """
    name = folder_name(short_name(request.model), *names, manifest["specification"]["dtype"], manifest["id"])

    def imported() -> Run | None:
        return find_finished(request.output / name, manifest, lambda run: run.complete, say, "auto")

    if (run := imported()) is None:
        with open_run(request.output, name, manifest, say) as writer:
            # Another process may have imported it before this one had the lock
            if (run := imported()) is None:
                finish(writer)
                return load_run(request.output / name)
    say(f"this log is imported already: {run.folder}")
    return run


def save_logs(writer: RunWriter, logs: Sequence[tuple[LoggedTask, Mapping[int, tuple[str, int]]]]) -> None:
    """Copy sample files, and the results files beside them, into the run folder's `lm_eval/`.

    Args:
        writer: the run folder.
        logs: each file, and number of a document in it → its leaf task and number in the run. Lines of other numbers
            or of earlier versions of lm-eval are written anew.

    Raises:
        DataError: a file was changed since it was read.
    """
    for log, names in logs:
        lines: dict[str, list[bytes]] = defaultdict(list)
        for task, line in _lines(log, names):
            lines[task].append(line)
        for task, members in lines.items():
            writer.save_bytes(f"lm_eval/samples_{task}_{log.time}.jsonl", b"".join(members))
    for time, summary in {log.time: log.summary for log, _ in logs}.items():
        if summary is not None:
            writer.save_bytes(f"lm_eval/results_{time}.json", summary.data)


def _lines(log: LoggedTask, names: Mapping[int, tuple[str, int]]) -> Iterator[tuple[str, bytes]]:
    for sample, data in lines_of(log):
        task, number = names[sample.doc_id]
        content = parse_json(data)
        current = _in_current_form(content, sample, number)
        line = data.removesuffix(b"\n") if current == content else json_bytes(current)
        yield task, line + b"\n"


def _in_current_form(content: dict[str, Any], sample: LoggedSample, number: int) -> dict[str, Any]:
    """Return a line as the present version of lm-eval writes it, with the number of its document in the run."""
    given = content["arguments"]
    requests = given.values() if isinstance(given, dict) else given
    arguments = {
        f"gen_args_{place}": {
            f"arg_{index}": part_of_request(part)
            for index, part in enumerate(one.values() if isinstance(one, dict) else one)
        }
        for place, one in enumerate(requests)
    }
    return content | {
        "doc_id": number,
        "arguments": arguments,
        "filter": sample.filter,
        "target": sample.target,
    }
