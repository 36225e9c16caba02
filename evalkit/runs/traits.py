"""Measurement settings of a run, its `Trait`s, and the devices that computed it, from its manifest.

Runs that differ in a refused trait measure another quantity and cannot share a table or a group of seeds; other
differences change scores by rounding only and are noted (docs/reference/tables.md). Neither properties of the model nor
settings that cannot change a score are traits. The device changes the last bits only, so it is not in the
specification: each batch in the journal records it, and a run that is resumed on other hardware warns.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from evalkit.inputs.values import text_digest
from evalkit.runs.continuous import outcome_of
from evalkit.runs.folder import Run

NO_BATCH = -1
"""Number of a batch of rows that need none: they are trivial, or another run's."""


class BatchDevice(NamedTuple):
    device: str
    """Torch's name of the device: "cpu", "cuda:1"; "cuda:0+cuda:1" of a model that is spread over both."""
    hardware: str
    """The accelerator's name, or the processor's architecture; several names are joined by "+"."""
    kernel: str
    """Attention kernel. Scored batches: one of `scoring.forward.KERNELS`, or another way of `scoring.engine`. Generated
    batches: the model's own implementation."""
    host: str
    threads: int = 0
    """Threads of a CPU, whose number changes the last bits; 0 for other devices, and where it is unknown."""

    @property
    def kind(self) -> tuple[str, str]:
        """Kind of device and its hardware. Batches of the same kind round alike, as far as the hardware decides."""
        return self.device.partition(":")[0], self.hardware


def place_of(device: str, kernel: str) -> BatchDevice:
    """Return the `BatchDevice` for a torch device of this machine."""
    import torch

    threads = torch.get_num_threads() if device == "cpu" else 0
    return BatchDevice(device, hardware_of(device), kernel, platform.node(), threads)


def hardware_of(device: str) -> str:
    """Return the accelerator's name, or the processor's architecture; several devices are joined by "+"."""
    if "+" in device:
        return "+".join(dict.fromkeys(map(hardware_of, device.split("+"))))
    if not device.startswith("cuda"):
        return platform.machine()
    import torch

    return torch.cuda.get_device_name(device)


def devices(batches: Iterable[tuple[str, int, BatchDevice | None]]) -> list[dict[str, Any]]:
    """Return the manifest's devices from (task, batch number, device) of each batch, numbers as "none,0-2,5"."""
    by_device: dict[BatchDevice, dict[str, set[int]]] = {}
    for task, number, device in batches:
        if device is not None:
            by_device.setdefault(device, {}).setdefault(task, set()).add(number)
    stored = []
    for device, tasks in by_device.items():
        ranges = {}
        for task, numbers in tasks.items():
            without_batch = ["none"] * (NO_BATCH in numbers)
            numbers.discard(NO_BATCH)
            firsts = [str(number) for number in sorted(numbers) if number - 1 not in numbers]
            lasts = [str(number) for number in sorted(numbers) if number + 1 not in numbers]
            spans = zip(firsts, lasts, strict=True)
            spanned = [first if first == last else f"{first}-{last}" for first, last in spans]
            ranges[task] = ",".join([*without_batch, *spanned])
        stored.append(device._asdict() | {"batches": ranges})
    return stored


def places(manifest: Mapping[str, Any]) -> list[BatchDevice]:
    """Return the devices that a finished run was computed on."""
    stored = manifest.get("devices", [])
    return [BatchDevice(*(device[name] for name in BatchDevice._fields)) for device in stored]


def kinds(manifest: Mapping[str, Any]) -> list[str]:
    """Return the distinct kinds of devices of a finished run: "cpu x86_64", "cuda NVIDIA H100"."""
    return list(dict.fromkeys(" ".join(device.kind) for device in places(manifest)))


@dataclass(frozen=True)
class Trait:
    """One setting that a run's scores depend on."""

    name: str
    value: str
    """Value in this run, printed after the name: "bfloat16"."""
    words: str
    """Name and value as one text: "dtype bfloat16"."""
    refused: bool
    """Whether runs that differ in it cannot share a table; otherwise the difference is noted."""


def traits(run: Run, rule: str | None = None) -> dict[str, Trait]:
    """Return a run's traits by name; `rule` is that of its numbers, by default the run's own."""
    specification, imported = run.manifest["specification"], is_imported(run.manifest)
    by_name: dict[str, Trait] = {}

    def add(name: str, value: object, words: str = "", refused: bool = True) -> None:
        by_name[name] = Trait(name, str(value), words or f"{name} {value}", refused)

    add("limit", *_limit(specification))
    add("template", run.template)
    add("template's text", str(specification.get("template", ""))[:12])
    if most := specification.get("max_prompt_tokens"):
        add("prompt tokens", f"at most {most:,}", f"prompts of at most {most:,} tokens")
    if run.rule is not None:
        if (shots := specification.get("num_fewshot")) is None and imported:
            add("solved examples", "unknown", "an unknown number of solved examples")
        elif shots is None:
            add("solved examples", "in the requests", "the requests' own solved examples")
        else:
            add("solved examples", shots or 0, f"{shots or 0}-shot")
        name = rule or str(run.manifest["rule"])
        add("rule", name, f"{'rule' if outcome_of(name) is None else 'outcome'} {name}")
        add("prompts", prompts := _prompts(specification), f"mean over prompts {prompts}")
    if run.rule is not None:
        add("control", specification.get("control") or "none")
    if windows := specification.get("windows"):
        add("windows", _windows(windows))
    if continuation := specification.get("continuation"):
        add("continuation", continuation, f"{continuation} continuations")
    add("dtype", specification.get("dtype"))
    add("quantisation", specification.get("quantise") or "none")
    extension = extension_words(specification)
    add("context extension", extension if specification.get("context_extension") else "none", extension)
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
    return by_name


def summary(run: Run, rule: str | None = None) -> str:
    """Return a run's measurement settings in one line, without hashes and versions.

    That the context is not extended is said where prompts have a length of their own, as in LongBench.
    """
    by_name = traits(run, rule)
    names = ("limit", "continuation", "windows", "template", "prompts", "solved examples", "prompt tokens", "rule",
             "dtype", "quantisation", "context extension", "control")  # fmt: skip
    usual = {("prompts", "one"), ("control", "none"), ("quantisation", "none")} | (
        {("context extension", "none")} if "prompt tokens" not in by_name else set()
    )
    shown = [by_name[name] for name in names if name in by_name]
    return ", ".join(trait.words for trait in shown if (trait.name, trait.value) not in usual)


def _limit(specification: Mapping[str, Any]) -> tuple[str, str]:
    if size := specification.get("sample"):
        seed = f"(seed {specification['seed']})"
        return f"{size:,} random {seed}", f"{size:,} random documents of each task {seed}"
    if selection := specification.get("selection"):
        hashed = selection[:12]
        if _may_be_all(specification):
            return f"unknown (selection {hashed})", f"an unknown part of each task's documents ({hashed})"
        return f"selection {hashed}", f"the logged selection of documents ({hashed})"
    if limit := specification.get("limit"):
        return str(limit), f"the first {f'{limit:,} documents' if limit > 1 else 'document'} of each task"
    return "none", "all documents"


def _may_be_all(specification: Mapping[str, Any]) -> bool:
    return specification.get("complete") == "unknown"


def selection_words(run: Run) -> str:
    """Return which documents of each task a run read, in words; empty if all."""
    value, words = _limit(run.manifest["specification"])
    return "" if value == "none" else words


def documents_read(specification: Mapping[str, Any]) -> str:
    """Return which documents of each task are read: "limit 200", "sample 500 (seed 3)"; empty if all.

    Of a look of `decide` it also has the earlier ones: "sample 283 after 200", "sample 200 (first look)". Of an
    imported log with any other documents it is "selection" with the beginning of a hash; "unknown selection" if they
    may be all.
    """
    if (size := specification.get("sample")) is not None:
        seed = specification["seed"]
        words = f"sample {size:,} (seed {seed})" if seed else f"sample {size:,}"
        if (earlier := specification.get("earlier")) is None:
            return words
        return f"{words} after {', '.join(map(str, earlier))}" if earlier else f"{words} (first look)"
    if selection := specification.get("selection"):
        return f"{'unknown ' * _may_be_all(specification)}selection {selection[:7]}"
    limit = specification.get("limit")
    return f"limit {limit:,}" if limit else ""


def _windows(windows: Mapping[str, int | None]) -> str:
    tokens, stride = windows["tokens"], windows["stride"]
    length = f"of at most {tokens:,} tokens" if tokens else "of the model's own length"
    return f"{length}, stride {stride:,}" if stride else length


def windows_of_text(specification: Mapping[str, Any]) -> str:
    """Return the windows of a text, in words; empty without one, and for windows of the model's own length."""
    windows = specification.get("windows")
    return f"windows {_windows(windows)}" if windows and any(windows.values()) else ""


def _prompts(specification: Mapping[str, Any]) -> str:
    if not (prompts := specification.get("prompts")):
        return "one"
    names, orders = ", ".join(prompts["templates"]), prompts["choice_orders"]
    content = text_digest(json.dumps(prompts, sort_keys=True))[:8]
    return f"{names}{f', {orders} orders of the options' if orders > 1 else ''} ({content})"


def extension_words(specification: Mapping[str, Any]) -> str:
    """Return how a run extends the context of its model, in words."""
    if not (extension := specification.get("context_extension")):
        return "no context extension"
    # Imported here, since most runs do not need its libraries
    from evalkit.models.context.extension import Extension

    return Extension(**extension).describe()


def is_imported(manifest: Mapping[str, Any]) -> bool:
    """Return whether a run was imported from another program's log."""
    return "imported" in manifest


def origin(manifest: Mapping[str, Any]) -> str:
    """Return what evaluated a run: "evalkit", or the imported log."""
    return str(manifest["imported"]["origin"]) if is_imported(manifest) else "evalkit"


def unofficial(manifest: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the tasks whose "documents" or solved "examples" are not the official ones, by these keys if any."""
    by_kind = {
        kind: [task for task, source in manifest.get(kind, {}).items() if source["official"] is False]
        for kind in ("documents", "examples")
    }
    return {kind: tasks for kind, tasks in by_kind.items() if tasks}


def caveats(manifest: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return task or group → what makes its numbers doubtful: unofficial documents or examples, and the run's caveats.

    Tables mark such a name, and averages over such tasks, with an asterisk.
    """
    by_name: dict[str, list[str]] = {}
    for kind, tasks in unofficial(manifest).items():
        for task in tasks:
            by_name.setdefault(task, []).append(f"not the official {kind}")
    for name, texts in manifest.get("caveats", {}).items():
        by_name.setdefault(name, []).extend(texts)
    return by_name


def caveat_mark(manifest: Mapping[str, Any], tasks: Iterable[str]) -> str:
    """Return an asterisk if a run has caveats of one of the tasks."""
    doubtful = caveats(manifest)
    return "*" * any(task in doubtful for task in tasks)


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
