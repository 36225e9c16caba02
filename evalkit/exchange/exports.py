"""Exports of a finished run to the formats of other tools.

In: a run folder. Out: files. `lm_eval` is written with every run and only copied here, and `run` is the run folder
itself, to publish; the others are made from results.json, without the model, its score table or torch. A package adds a
format by an entry point of the group `evalkit.exports`, whose name is the format's and whose object is an `Export`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from evalkit.errors import RunError, UsageError
from evalkit.exchange.content import Content, content_of
from evalkit.exchange.published import published_files
from evalkit.paths import replace_file
from evalkit.plugins import added, call_added, load_added
from evalkit.runs.folder import Run

GROUP = "evalkit.exports"
Export = Callable[[Content], Mapping[str, str]]
"""Function from a run's content to its files: file name → text."""
_COPIED, _PUBLISHED = "lm_eval", "run"
_OWN = {"hub": "evalkit.exchange.hub_metadata", "every_eval_ever": "evalkit.exchange.every_eval_ever"}
FORMS = (_COPIED, *_OWN, _PUBLISHED)
"""evalkit's own formats."""


def form_names() -> list[str]:
    """Return the names of evalkit's own formats, then of those of other packages."""
    return [*FORMS, *sorted(added(GROUP).keys() - set(FORMS))]


def export_run(run: Run, form: str, rule: str | None = None, output: Path | None = None) -> list[Path]:
    """Export a run in a format, by default into a folder of that name in the run folder; return the files.

    Raises:
        UnknownNameError: there is no such format, or the run was not scored for that rule.
        UsageError: the format cannot represent this run, its package cannot be imported, or the run would be replaced.
        RunError: a file cannot be written.
    """
    folder = output or run.folder / form
    if form == _COPIED:
        if rule is not None:
            raise UsageError("lm-eval's format contains every rule; omit --rule")
        files = {Path(name).name: run.read(name) for name in sorted(run.files) if name.startswith("lm_eval/")}
        if not files:
            raise UsageError(f"run {run.folder} of {run.kind} has no files in lm-eval's format; use every_eval_ever")
    elif form == _PUBLISHED:
        if rule is not None:
            raise UsageError("a run to publish contains every rule; omit --rule")
        if (target := folder / run.folder.name).exists() and target.samefile(run.folder):
            raise UsageError(f"--output {folder} holds the run itself, which would be replaced; choose another folder")
        files = published_files(run)
    else:
        files = {name: text.encode() for name, text in _texts(form, content_of(run, rule)).items()}
    return [_write(folder / name, content) for name, content in files.items()]


def _texts(form: str, content: Content) -> Mapping[str, str]:
    if form in _OWN:
        own: Export = import_module(_OWN[form]).files
        return own(content)
    found = call_added(f"export {form}", load_added(GROUP, form, "export", FORMS), content)
    if not isinstance(found, Mapping) or not all(isinstance(one, str) for pair in found.items() for one in pair):
        raise UsageError(f"export {form} returned a {type(found).__name__}; it must return file names and their texts")
    return found


def _write(path: Path, content: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.is_file() and path.read_bytes() == content):
            replace_file(path, content)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}; choose another --output") from error
    return path
