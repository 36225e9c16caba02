"""Exports of a finished run to the formats of other tools, and as a run folder to publish.

`lm_eval` is written with every run and copied; `run` is the run folder without its journal and without paths and names
of the machine, of the same id and numbers; the others are made from results.json. A package adds a format by an entry
point of the group `evalkit.exports`, whose name is the format's and whose object is an `Export`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evalkit.errors import RunError, UsageError
from evalkit.exchange.formats import Content, content_of, every_eval_ever_files, hub_files
from evalkit.paths import replace_file
from evalkit.plugins import added, call_added, load_added
from evalkit.runs.folder import MANIFEST, RESULTS, Run, content_digest, digest, json_bytes, sealed

GROUP = "evalkit.exports"
Export = Callable[[Content], Mapping[str, str]]
"""Function from a run's content to its files: file name → text."""
_COPIED, _PUBLISHED = "lm_eval", "run"
_OWN: dict[str, Export] = {"hub": hub_files, "every_eval_ever": every_eval_ever_files}
FORMS = (_COPIED, *_OWN, _PUBLISHED)
"""evalkit's own formats."""


def form_names() -> list[str]:
    """Return the names of evalkit's own formats, then of those of other packages."""
    return [*FORMS, *sorted(added(GROUP).keys() - set(FORMS))]


def export_run(run: Run, form: str, rule: str | None = None, output: Path | None = None) -> list[Path]:
    """Export a run in a format, by default into a folder of that name in the run folder; return the files.

    A format that cannot represent this run, or would replace it, is a `UsageError`; a file that cannot be written a
    `RunError`.
    """
    folder = output or run.folder / form
    if rule is not None and form in (_COPIED, _PUBLISHED):
        raise UsageError(f"--to {form} contains every rule; omit --rule")
    if form == _COPIED:
        files = {Path(name).name: run.read(name) for name in sorted(run.files) if name.startswith("lm_eval/")}
        if not files:
            raise UsageError(f"run {run.folder} of {run.kind} has no files in lm-eval's format; use every_eval_ever")
    elif form == _PUBLISHED:
        if (target := folder / run.folder.name).exists() and target.samefile(run.folder):
            raise UsageError(f"--output {folder} holds the run itself, which would be replaced; choose another folder")
        files = published_files(run)
    else:
        make, content = _OWN.get(form) or load_added(GROUP, form, "export", FORMS), content_of(run, rule)
        files = call_added(f"export {form}", lambda: {name: text.encode() for name, text in make(content).items()})
    for path, data in ((folder / name, data) for name, data in files.items()):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not (path.is_file() and path.read_bytes() == data):
                replace_file(path, data)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror or error}; choose another --output") from error
    return [folder / name for name in files]


_PATHS = frozenset(
    ("command", "config_source", "data_dir", "data_files", "include_path", "model", "model_args", "model_name", "path",
     "pretrained", "source")
)  # fmt: skip
"""Keys of paths, and of words of a command."""
_NAME = r"[^\s/\\,;:=|'\"`()\[\]{}]+"
_IN_TEXT = re.compile(
    rf"""
    (?:^|(?<=[\s,;:=|'"`(\[{{]))
    (?: file:/+(?:{_NAME}/+)*
      | ~[\w.-]*/+(?:{_NAME}/+)*
      | (?:{_NAME}/+)*?\.\./+(?:{_NAME}/+)*
      | [A-Za-z]:[\\/]+(?:{_NAME}[\\/]+)+
      | (?<!:)(?:\\\\|//)(?:{_NAME}[\\/]+)+
      | /(?:{_NAME}/+)+
    )
    ({_NAME})[\\/]*
    """,
    re.VERBOSE,
)
"""A path of at least two parts, of which the last is the group. `//` after a colon begins a URL's host."""
_ROOT = r"""(?x:
    file:/ | ~[\w.-]*[\\/] | (?:[^\\/,;=]+[\\/]+)*\.\.[\\/] | [A-Za-z]:[\\/]
  | \\\\[\w.$-]+\\[\w.$-] | //[^/\s] | /[^/\s,;][^/,;]*/
)"""
"""The beginning of a path whose parts may contain spaces."""


_WORD = r"(?:[\w.-]+\s)?"
_VALUES = re.compile(rf"((?:^|[=,;]\s*){_WORD})({_ROOT}.*?)(?=[,;]\s*{_WORD}{_ROOT}|$)", re.DOTALL)
"""A path, or a path after a word, which says where documents are from."""


def without_folders(value: Any, paths: re.Pattern[str] | None = None) -> Any:
    """Return plain data in which paths have only their last part, also in keys; `paths` matches those with spaces."""
    if isinstance(value, list):
        return [without_folders(item, paths) for item in value]
    if isinstance(value, str):

        def shortened(match: re.Match[str]) -> str:
            return match[1] + (re.split(r"[\\/]", match[2].rstrip("\\/"))[-1] or match[2])

        return _IN_TEXT.sub(r"\1", value if paths is None else paths.sub(shortened, value))
    if not isinstance(value, dict):
        return value
    content: dict[str, Any] = {}
    for key, item in value.items():
        short = _IN_TEXT.sub(r"\1", key)
        of_key = _VALUES if key in _PATHS else paths
        content[f"{short} ({len(content) + 1})" if short in content else short] = without_folders(item, of_key)
    return content


def published_files(run: Run) -> dict[str, bytes]:
    """Return the files of a run to publish: name, with the run's folder → content. Each is verified."""
    manifest = _manifest(run.manifest)
    files = {name: _content(run, name) for name in sorted(run.files) if name != MANIFEST}
    digests = {name: digest(content) for name, content in files.items()} | {MANIFEST: content_digest(manifest)}
    figures = [path for path in sorted(run.folder.iterdir()) if path.suffix in (".png", ".pdf", ".svg")]
    files |= {path.name: path.read_bytes() for path in figures}
    results = {"run": run.manifest["id"], "files": digests, **run.stored}
    files |= {
        name: json_bytes(sealed(part), indent=2) + b"\n" for name, part in ((MANIFEST, manifest), (RESULTS, results))
    }
    return {f"{run.folder.name}/{name}": data for name, data in files.items()}


def _content(run: Run, name: str) -> bytes:
    content = run.read(name)
    return json_bytes(without_folders(json.loads(content)), indent=2) + b"\n" if name.endswith(".json") else content


def _manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without paths and names of the machine, as plain data."""
    plain: dict[str, Any] = json.loads(json_bytes(manifest))
    # As they are: what determines the numbers, and what they mean
    kept = {name: plain[name] for name in ("specification", "template") if name in plain}
    published: dict[str, Any] = without_folders(plain) | kept
    if isinstance(hardware := published.get("hardware"), dict) and "system" in hardware:
        hardware["system"] = str(hardware["system"]).partition("-")[0]
    for device in published.get("devices", ()):
        device["host"] = ""
    if published.get("path") is not None:
        # As it was given, from which several checkpoints of one name are distinguished
        published["path"] = published["model"]
    if isinstance(command := published.get("command"), list) and command:
        published["command"] = ["evalkit", *command[1:]]
    return published
