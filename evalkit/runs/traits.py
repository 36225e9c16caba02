"""Measurement settings of a run.

In: a run's manifest. Out: its `Trait`s: the settings that determine its scores besides the checkpoint and the content
of its documents (`benchmarks/registry.py` compares those of two runs). Runs that differ in a refused trait measure
another quantity and cannot share a table or a group of seeds. Other differences change scores by rounding only and are
noted (docs/reference/tables.md lists both). Settings that cannot change a score are not traits: the token budget, and
how prefixes are shared, which the start-up check compares with the model's own forward pass. Properties of the model
itself (its context window, its end tokens) are not traits either.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evalkit.escape import counted
from evalkit.runs.batch_devices import kinds
from evalkit.runs.continuous import outcome_of
from evalkit.runs.folder import Run

_SUMMARY = (
    "limit",
    "continuation",
    "windows",
    "template",
    "prompts",
    "solved examples",
    "prompt tokens",
    "rule",
    "dtype",
    "context extension",
)
"""Traits in a run's one-line summary; the others are hashes and versions."""
_ONE = "one"
"""Value of the trait "prompts" of a run under its own prompt alone."""


@dataclass(frozen=True)
class Trait:
    """One setting that a run's scores depend on."""

    name: str
    """Name of the setting: "dtype"."""
    value: str
    """Value in this run, printed after the name: "bfloat16"."""
    words: str
    """Name and value as one text: "dtype bfloat16"."""
    refused: bool
    """Whether runs that differ in it cannot share a table; otherwise the difference is noted."""


def is_imported(manifest: Mapping[str, Any]) -> bool:
    """Return whether a run was imported from another program's log."""
    return "imported" in manifest


def origin(manifest: Mapping[str, Any]) -> str:
    """Return what evaluated a run: "evalkit", or the imported log."""
    return str(manifest["imported"]["origin"]) if is_imported(manifest) else "evalkit"


def origin_notes(manifest: Mapping[str, Any]) -> list[str]:
    """Return a note about an imported run; none for evalkit's own."""
    if not is_imported(manifest):
        return []
    files = counted(len(manifest["imported"]["files"]), "file")
    parts = "".join(f"; {part}" for part in manifest["imported"].get("parts", []))
    return [f"imported from {origin(manifest)} ({files}{parts}); evalkit did not compute its scores"]


def max_prompt_tokens(specification: Mapping[str, Any]) -> int | None:
    """Return the length in tokens above which prompts lose their middle; None if none is."""
    found: int | None = specification.get("max_prompt_tokens")
    return found


def traits(run: Run, rule: str | None = None) -> dict[str, Trait]:
    """Return a run's traits by name.

    `rule` is that of its numbers; None: the run's own. Not used for runs whose answers no rule chooses.
    """
    specification, imported = run.manifest["specification"], is_imported(run.manifest)
    found: dict[str, Trait] = {}

    def add(name: str, value: object, words: str = "", refused: bool = True) -> None:
        found[name] = Trait(name, str(value), words or f"{name} {value}", refused)

    add("limit", *_limit(specification))
    add("template", run.template)
    add("template's text", str(specification.get("template", ""))[:12])
    if most := max_prompt_tokens(specification):
        add("prompt tokens", f"at most {most:,}", f"prompts of at most {most:,} tokens")
    if run.rule is not None:
        if (shots := specification.get("num_fewshot")) is None and imported:
            add("solved examples", "unknown", "an unknown number of solved examples")
        else:
            add("solved examples", shots or 0, f"{shots or 0}-shot")
        name = rule or str(run.manifest["rule"])
        add("rule", name, f"{'rule' if outcome_of(name) is None else 'outcome'} {name}")
        add("prompts", prompts := _prompts(specification), f"mean over prompts {prompts}")
    if windows := specification.get("windows"):
        add("windows", _windows(windows))
    if continuation := specification.get("continuation"):
        add("continuation", continuation, f"{continuation} continuations")
    add("dtype", specification.get("dtype"))
    add("context extension", *_extension(specification.get("context_extension")))
    add("origin", origin(run.manifest), refused=False)
    if not imported:
        add("scoring version", specification.get("scoring"))
    if "version" in specification:
        add("benchmark version", specification["version"])
    if not imported:
        # The implementation that was loaded; the requested one may be "auto"
        loaded = (run.manifest.get("loaded") or {}).get("attention")
        add("attention", loaded or specification.get("attention"), refused=False)
    if device := " and ".join(kinds(run.manifest)):
        add("device", device, refused=False)
    for library, version in specification.get("versions", {}).items():
        add(f"{library} version", version, f"{library} {version}", refused=False)
    return found


def selection_words(run: Run) -> str:
    """Return which documents of each task a run read, in words; empty if all."""
    value, words = _limit(run.manifest["specification"])
    return "" if value == "none" else words


def windows_of_text(specification: Mapping[str, Any]) -> str:
    """Return the windows of a text, in words; empty without one, and for windows of the model's own length."""
    windows = specification.get("windows")
    return f"windows {_windows(windows)}" if windows and any(windows.values()) else ""


def documents_read(specification: Mapping[str, Any]) -> str:
    """Return which documents of each task are read: "limit 200", "sample 500 (seed 3)"; empty if all.

    Of an imported log with any other documents it is "selection" with the beginning of a hash; "unknown selection" if
    they may be all.
    """
    if (size := specification.get("sample")) is not None:
        seed = specification["seed"]
        return f"sample {size:,}" + (f" (seed {seed})" if seed else "")
    if chosen := specification.get("selection"):
        return f"{'unknown ' * _may_be_all(specification)}selection {chosen[:7]}"
    limit = specification.get("limit")
    return f"limit {limit:,}" if limit else ""


def model_differences(a: Run, b: Run) -> list[str]:
    """Return the properties in which two runs' models differ, as far as recorded; seeds of one model differ in none."""
    first, second = (run.manifest.get("loaded") or {} for run in (a, b))
    if first.get("shape") and second.get("shape"):
        first, second = first["shape"], second["shape"]
        return [key for key in first | second if first.get(key) != second.get(key)]
    known = [key for key in ("architecture", "parameters") if key in first and key in second]
    return [key for key in known if first[key] != second[key]]


def same_checkpoint(runs: Sequence[Run]) -> tuple[Run, Run] | None:
    """Return the first two runs of the same checkpoint, which cannot be two seeds; None if all differ."""
    seen: dict[str, Run] = {}
    for run in runs:
        if (first := seen.setdefault(checkpoint_of(run), run)) is not run:
            return first, run
    return None


def checkpoint_of(run: Run) -> str:
    """Return the identity of a run's checkpoint as text: everything its numbers depend on."""
    return str(run.manifest["specification"]["checkpoint"])


def summary(run: Run, rule: str | None = None) -> str:
    """Return a run's measurement settings in one line."""
    found = traits(run, rule)
    shown = [found[name] for name in _SUMMARY if name in found]
    usual = {("context extension", "none"), ("prompts", _ONE)}
    return ", ".join(trait.words for trait in shown if (trait.name, trait.value) not in usual)


def unofficial(manifest: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the tasks whose "documents", or solved "examples", are not the official ones, by these keys where any.

    Material without an official version, such as a needle test's text, is never listed.
    """
    found = {
        kind: [task for task, source in manifest.get(kind, {}).items() if source["official"] is False]
        for kind in ("documents", "examples")
    }
    return {kind: tasks for kind, tasks in found.items() if tasks}


def unofficial_notes(manifest: Mapping[str, Any]) -> list[str]:
    """Return a note for each kind of unofficial material in a run."""
    return [f"not the official {kind} of {', '.join(tasks)}" for kind, tasks in unofficial(manifest).items()]


def caveats(manifest: Mapping[str, Any], task: str) -> list[str]:
    """Return a note for each kind of unofficial material in a task."""
    return [f"not the official {kind}" for kind, tasks in unofficial(manifest).items() if task in tasks]


def _limit(specification: Mapping[str, Any]) -> tuple[str, str]:
    """Return which documents of each task are read: all, the first ones, or a random sample; short, and in words."""
    if size := specification.get("sample"):
        seed = f"(seed {specification['seed']})"
        return f"{size:,} random {seed}", f"{size:,} random documents of each task {seed}"
    if chosen := specification.get("selection"):
        if _may_be_all(specification):
            return f"unknown (selection {chosen[:12]})", f"an unknown part of each task's documents ({chosen[:12]})"
        return f"selection {chosen[:12]}", f"the logged selection of documents ({chosen[:12]})"
    if limit := specification.get("limit"):
        return str(limit), f"the first {f'{limit:,} documents' if limit > 1 else 'document'} of each task"
    return "none", "all documents"


def _may_be_all(specification: Mapping[str, Any]) -> bool:
    """Return whether an imported log does not say if its documents are all of each task."""
    return specification.get("complete") == "unknown"


def _windows(windows: Mapping[str, int | None]) -> str:
    """Return how texts are cut; the model's own context window is its property, and no trait."""
    tokens, stride = windows["tokens"], windows["stride"]
    length = f"of at most {tokens:,} tokens" if tokens else "of the model's own length"
    return f"{length}, stride {stride:,}" if stride else length


def _prompts(specification: Mapping[str, Any]) -> str:
    """Return the prompts of a run beside its template: "one", or their names, the orders of options and a hash."""
    if not (found := specification.get("prompts")):
        return _ONE
    names, orders = ", ".join(found["templates"]), found["choice_orders"]
    content = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:8]
    return f"{names}{f', {orders} orders of the options' if orders > 1 else ''} ({content})"


def _extension(specification: Mapping[str, Any] | None) -> tuple[str, str]:
    if not specification:
        return "none", "no context extension"
    # Imported here, since most runs do not need its libraries
    from evalkit.models.context.extension import Extension

    words = Extension(**specification).describe()
    return words, words
