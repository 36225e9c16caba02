"""A finished run in the forms that other tools read.

In: a run folder. Out: files. `lm_eval` is written with every run and only copied here; the others are made from
results.json, without the model, its score table or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evalkit.atomic import replace_file
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.runs.folder import Run

FORMS = ("lm_eval", "hub", "every_eval_ever")


def export_run(run: Run, form: str, rule: str | None = None, output: Path | None = None) -> list[Path]:
    """Write a run in a form, into a folder of that name in the run folder where no other is given.

    Raises:
        UnknownNameError: there is no such form, or the run was not scored for that rule.
        UsageError: the form cannot hold this run.
        RunError: a file cannot be written.
    """
    if form not in FORMS:
        raise UnknownNameError("export", form, FORMS)
    folder = output or run.folder / form
    if form == "lm_eval":
        if rule is not None:
            raise UsageError("lm-eval's form holds every rule at once; leave out --rule")
        files = {Path(name).name: run.read(name) for name in sorted(run.files) if name.startswith("lm_eval/")}
        if not files:
            raise UsageError(f"run {run.folder} of {run.kind} has no files in lm-eval's form; use every_eval_ever")
    else:
        files = {name: text.encode() for name, text in _made(run, form, rule).items()}
    return [_write(folder / name, content) for name, content in files.items()]


def _made(run: Run, form: str, rule: str | None) -> Mapping[str, str]:
    from evalkit.export import every_eval_ever, hub
    from evalkit.export.content import content_of

    content = content_of(run, rule)
    return hub.files(content) if form == "hub" else every_eval_ever.files(content)


def _write(path: Path, content: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.is_file() and path.read_bytes() == content):
            replace_file(path, content)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}; choose another --output") from error
    return path
