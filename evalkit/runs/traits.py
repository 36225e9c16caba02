"""How a run was measured.

In: a run's manifest. Out: its `Trait`s: what determines its scores beside the checkpoint and the content of its
documents (`benchmarks/alike.py` puts two runs beside each other). Each says whether runs that differ in it are refused
a common table or group of seeds, since another quantity was measured, or whether the difference is noted, since it
moves scores by rounding only (docs/reference/tables.md lists them). What cannot change a score is
none: the token budget, and how prefixes are shared, which the start-up check compares with the model's own forward
pass. What a model is itself (its window, its end tokens) is no trait of the measurement either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evalkit.runs.batch_devices import kinds
from evalkit.runs.folder import Run

_SUMMARY = ("limit", "template", "solved examples", "prompt tokens", "rule", "dtype", "context extension")
"""What a line about a run says; the others are hashes and versions."""


@dataclass(frozen=True)
class Trait:
    """One thing that a run's scores depend on."""

    name: str
    """What it is: "dtype"."""
    value: str
    """What it is in this run, beside the name: "bfloat16"."""
    words: str
    """The same by itself: "dtype bfloat16"."""
    refused: bool
    """Whether runs that differ in it do not share a table; else the difference is noted."""


def max_prompt_tokens(specification: Mapping[str, Any]) -> int | None:
    """Tokens above which a run's prompts lose their middle; earlier versions of evalkit called it the window."""
    found: int | None = specification.get("max_prompt_tokens", specification.get("window"))
    return found


def traits(run: Run, rule: str | None = None) -> dict[str, Trait]:
    """A run's traits by name.

    Args:
        run: any run.
        rule: under which its numbers are read; its own if none is named. Generated texts have none.
    """
    specification, loaded = run.manifest["specification"], run.manifest.get("loaded") or {}
    limit, shots = specification.get("limit"), specification.get("num_fewshot") or 0
    documents = (
        f"the first {f'{limit:,} documents' if limit > 1 else 'document'} of each task" if limit else "all documents"
    )
    found = [
        Trait("limit", str(limit or "none"), documents, True),
        _trait("template", run.template),
        _trait("template's text", str(specification.get("template", ""))[:12]),
    ]
    if most := max_prompt_tokens(specification):
        found.append(Trait("prompt tokens", f"at most {most:,}", f"prompts of at most {most:,} tokens", True))
    if run.rule is not None:
        found.append(Trait("solved examples", str(shots), f"{shots}-shot", True))
        found.append(_trait("rule", rule or str(run.manifest["rule"])))
    found += [
        _trait("dtype", str(specification.get("dtype"))),
        _extension(specification.get("context_extension")),
        _trait("scoring version", str(specification.get("scoring"))),
        # What the model was loaded with says more than what was asked for, which may be "auto"
        _trait("attention", str(loaded.get("attention") or specification.get("attention")), refused=False),
    ]
    if device := " and ".join(kinds(run.manifest)):
        found.append(_trait("device", device, refused=False))
    found += [
        Trait(f"{name} version", str(text), f"{name} {text}", False)
        for name, text in specification.get("versions", {}).items()
    ]
    return {trait.name: trait for trait in found}


def model_differences(a: Run, b: Run) -> list[str]:
    """In what the models of two runs differ, as far as their manifests tell: seeds of one model differ in nothing."""
    first, second = (run.manifest.get("loaded") or {} for run in (a, b))
    if first.get("shape") and second.get("shape"):
        first, second = first["shape"], second["shape"]
        return [key for key in first | second if first.get(key) != second.get(key)]
    known = [key for key in ("architecture", "parameters") if key in first and key in second]
    return [key for key in known if first[key] != second[key]]


def same_checkpoint(runs: Sequence[Run]) -> tuple[Run, Run] | None:
    """The first two runs of one checkpoint, which are not two seeds."""
    seen: dict[str, Run] = {}
    for run in runs:
        if (first := seen.setdefault(checkpoint_of(run), run)) is not run:
            return first, run
    return None


def checkpoint_of(run: Run) -> str:
    """What a checkpoint's numbers depend on, as one text."""
    return str(run.manifest["specification"]["checkpoint"])


def summary(run: Run, rule: str | None = None) -> str:
    """How a run was measured, in a line."""
    found = traits(run, rule)
    shown = [found[name] for name in _SUMMARY if name in found]
    return ", ".join(trait.words for trait in shown if (trait.name, trait.value) != ("context extension", "none"))


def unofficial(manifest: Mapping[str, Any]) -> dict[str, list[str]]:
    """Tasks of a run whose "documents", or solved "examples", are not the published ones; without either where none.

    Of what was never published, such as a needle test's text, nothing is said.
    """
    found = {
        kind: [task for task, source in manifest.get(kind, {}).items() if source["official"] is False]
        for kind in ("documents", "examples")
    }
    return {kind: tasks for kind, tasks in found.items() if tasks}


def unofficial_notes(manifest: Mapping[str, Any]) -> list[str]:
    """What `unofficial` finds, in words."""
    return [f"not the official {kind} of {', '.join(tasks)}" for kind, tasks in unofficial(manifest).items()]


def caveats(manifest: Mapping[str, Any], task: str) -> list[str]:
    """What of a task is not the published one, in words."""
    return [f"not the official {kind}" for kind, tasks in unofficial(manifest).items() if task in tasks]


def _trait(name: str, value: str, refused: bool = True) -> Trait:
    return Trait(name, value, f"{name} {value}", refused)


def _extension(specification: Mapping[str, Any] | None) -> Trait:
    if not specification:
        return Trait("context extension", "none", "no context extension", True)
    # Here, since most runs need none of its libraries
    from evalkit.models.context import Extension

    words = Extension(**specification).describe()
    return Trait("context extension", words, words, True)
