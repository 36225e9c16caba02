"""lm-eval's options, as its users type them: what evalkit understands, and what it calls the others.

In: the arguments of `evalkit run`, an unknown option, or `--model hf --model_args …`. Out: evalkit's arguments, one
line of help, or evalkit's model and settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from evalkit.errors import DataError, UsageError, check_known
from evalkit.inputs.reading import read_task_file
from evalkit.models.loading.spec import context_settings, model_spec

OPTIONS = {
    "--apply-chat-template": "give --template chat",
    "--batch-size": "batches are made by tokens; leave it out, or give --token-budget",
    "--cache-requests": "leave it out; an interrupted run is resumed by the same command",
    "--check-integrity": "evalkit data says whether documents are the official ones",
    "--confirm-run-unsafe-code": "leave it out; tasks that run generated code are not supported",
    "--fewshot-as-multiturn": "solved examples are part of the prompt; leave it out",
    "--gen-kwargs": "the task's own settings of generation are used; leave it out",
    "--hf-hub-log-args": "leave it out; evalkit export RUN --to hub writes the hub's metadata",
    "--max-batch-size": "batches are made by tokens; give --token-budget",
    "--metadata": "leave it out; lengths of RULER are evalkit ruler --lengths",
    "--output-path": "give --output FOLDER for run folders, or > FILE for what is printed",
    "--predict-only": "leave it out; answers are in the run folder, with --log-samples as lm-eval writes them",
    "--samples": "give --sample N, or --limit N",
    "--show-config": "evalkit ls tasks, or the run's manifest.json",
    "--system-instruction": "write it into a template file (docs/running.md), as --template FILE.yaml",
    "--trackio-args": "leave it out; --format json prints every number",
    "--use-cache": "leave it out; finished batches are kept, and the same command resumes",
    "--verbosity": "leave it out; evalkit --debug shows tracebacks",
    "--wandb-args": "leave it out; --format json prints every number",
    "--wandb-config-args": "leave it out; --format json prints every number",
    "--write-out": "give --show-prompts 1",
}
"""Option that evalkit does not have → what to do."""
_SHORT = {
    "-a": "--model-args",
    "-b": "--batch-size",
    "-C": "--config",
    "-c": "--use-cache",
    "-E": "--samples",
    "-f": "--num-fewshot",
    "-L": "--limit",
    "-M": "--model",
    "-m": "--model",
    "-s": "--log-samples",
    "-t": "--tasks",
    "-v": "--verbosity",
    "-w": "--write-out",
    "-x": "--predict-only",
}
"""lm-eval's short options; -m is that of its earlier versions."""
_SEVERAL = ("--tasks", "--model-args")
"""Options that lm-eval gives all following words, and that may be given again."""
_HF = ("hf", "hf-auto", "huggingface")
_ARGUMENTS = {
    "pretrained": "model", "revision": "revision", "tokenizer": "tokenizer", "dtype": "dtype", "device": "device",
    "attn_implementation": "attention", "max_length": "context",
}  # fmt: skip
"""Key of `--model_args` → evalkit's setting."""
_OTHER_ARGUMENTS = {
    "add_bos_token": "leave it out; BOS is added as the checkpoint's tokenizer does",
    "autogptq": "name a quantised checkpoint itself; or simulate rounding by --quantise",
    "batch_size": OPTIONS["--batch-size"],
    "gguf_file": "name the file: --model FILE.gguf",
    "load_in_4bit": "name a quantised checkpoint itself; or simulate rounding by --quantise",
    "load_in_8bit": "name a quantised checkpoint itself; or simulate rounding by --quantise",
    "max_batch_size": OPTIONS["--max-batch-size"],
    "parallelize": "give --device-map auto",
    "peft": "name the adapter's folder: --model FOLDER",
    "trust_remote_code": "give --trust-remote-code itself, which lets the checkpoint's code run",
}
"""Key of `--model_args` that evalkit does not have → what to do."""
_BETWEEN_ARGUMENTS = re.compile(r",(?![^\[({]*[\])}])")
"""Commas outside brackets."""


def in_long_form(given: Sequence[str]) -> list[str]:
    """Return arguments of `evalkit run` as evalkit reads them: lm-eval's short options in their long form.

    In a command as for lm-eval, with its name of a model or with `--model_args`, the words after `--tasks` and
    `--model_args` belong to these options.
    """
    end = given.index("--") if "--" in given else len(given)
    words = [_SHORT.get(word, word) for word in given[:end]]
    options = [option_in(word) for word in words]
    models = [value for word, value in pairwise(words) if word == "--model"]
    models += [word.partition("=")[2] for word in words if word.startswith("--model=")]
    if "--model-args" not in options and not set(models) & {*_HF}:
        return [*words, *given[end:]]
    gathered: dict[str, list[str]] = {option: [] for option in _SEVERAL}
    others: list[str] = []
    current = ""
    for word, option in zip(words, options, strict=True):
        if option in _SEVERAL:
            current = option
            gathered[option] += [word.partition("=")[2]] if "=" in word else []
        elif option or not current:
            current = ""
            others.append(word)
        else:
            gathered[current].append(word)
    joined = [part for option in _SEVERAL if option in options for part in (option, ",".join(gathered[option]))]
    return [*others, *joined, *given[end:]]


def option_in(word: str) -> str:
    """Return the option that a word of a command line is, without a value; empty if it is none."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("-") else ""


def advice(option: str) -> str | None:
    """Return what to do in place of an option of lm-eval that evalkit does not have; None: it is none of these."""
    name = _SHORT.get(option, option)
    if name not in OPTIONS:
        return None
    return f"{option if name == option else f'{option} ({name})'} is lm-eval's: {OPTIONS[name]}"


def check_is_checkpoint(name: str) -> None:
    """Raise a `UsageError` for a value of lm-eval's `--model`, a program or service, that is no folder or file here."""
    if "/" in name or Path(name).exists():
        return
    from evalkit.compatibility.lm_eval import model_names

    if name not in model_names():
        return
    if name in _HF:
        raise UsageError(f"--model {name}: is lm-eval's; name the checkpoint: --model CKPT")
    raise UsageError(
        f"--model {name}: is not a checkpoint; evalkit computes itself, because a run is bound to the weights that it "
        "reads: name a folder, a hub name or a .gguf file: --model CKPT"
    )


def with_model_args(model: str | None, given: str | None, options: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the checkpoint and the settings that lm-eval's `--model hf --model_args key=value,…` mean.

    Raises:
        UsageError: another of lm-eval's models, a key without a setting of evalkit, or a setting given twice.
    """
    if given is None:
        return model, options
    if model not in (None, *_HF):
        check_is_checkpoint(model)
        raise UsageError(f"--model-args is for --model hf, as in lm-eval; here --model {model} is the checkpoint")
    settings: dict[str, Any] = {}
    for key, value in _model_args(given):
        part = f"{key}={value}"
        if key in _OTHER_ARGUMENTS:
            raise UsageError(f"--model-args {part}: {_OTHER_ARGUMENTS[key]}")
        check_known("key of --model-args", [key], _ARGUMENTS)
        if (name := _ARGUMENTS[key]) in settings or options.get(name) not in (None, "auto"):
            raise UsageError(f"--model-args {part}: {key} is given twice; give it once")
        if not value:
            raise UsageError(f"--model-args {key}: has no value; write it as {key}=VALUE")
        try:
            spec = model_spec(value) if name == "model" else model_spec("model", **{name: value})
            context_settings(spec.context)
        except UsageError as error:
            raise UsageError(f"--model-args {part}: {str(error).replace(f'--{name}', key)}") from error
        settings[name] = value
    return settings.pop("model", None), options | settings


def _model_args(given: str) -> list[tuple[str, str]]:
    """Return keys and values of `--model_args`, which are written as JSON, or as key=value,…."""
    if not given.lstrip().startswith("{"):
        parts = [part.partition("=") for part in _BETWEEN_ARGUMENTS.split(given) if part]
        return [(key.strip(), value.strip().strip("'\"")) for key, _, value in parts]
    try:
        content = json.loads(given)
    except ValueError as error:
        raise UsageError(f"--model-args {given}: cannot be read as JSON ({error}); or write key=value,…") from error
    return [(key, str(value)) for key, value in content.items() if value is not None]


def with_task_files(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with tasks that are given as YAML files by their names, and the files' folder.

    Raises:
        UsageError: the files are in several folders, or not in that of `--include-path`.
        DataError: a file cannot be read, or names no task.
    """
    given = options.get("tasks") or ()
    files = {task: Path(task) for task in given if Path(task).suffix in (".yaml", ".yml")}
    if not files:
        return options
    folders = {file.parent for file in files.values()} | ({options.get("include_path")} - {None})
    if len(folders) > 1:
        raise UsageError(f"--tasks {','.join(files)}: task files must be in one folder, that of --include-path")
    names = {}
    for task, file in files.items():
        content = read_task_file(file, DataError, "task file")
        if not isinstance(content, dict) or not isinstance(name := content.get("task") or content.get("group"), str):
            raise DataError(f"task file {file}: has no text under 'task'")
        names[task] = name
    return options | {"tasks": tuple(names.get(task, task) for task in given), "include_path": folders.pop()}
