"""lm-eval's options, as its users type them: what evalkit understands, and what it calls the others.

In: a mistyped option, or `--model hf --model_args …`. Out: one line of help, or evalkit's model and settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalkit.errors import DataError, UnknownNameError, UsageError
from evalkit.inputs.reading import read_task_file
from evalkit.models.loading.spec import context_settings, model_spec

OPTIONS = {
    "--apply-chat-template": "give --template chat",
    "--batch-size": "batches are made by tokens; leave it out, or give --token-budget",
    "--cache-requests": "leave it out; an interrupted run is resumed by the same command",
    "--check-integrity": "evalkit data says whether documents are the official ones",
    "--fewshot-as-multiturn": "solved examples are part of the prompt; leave it out",
    "--gen-kwargs": "the task's own settings of generation are used; leave it out",
    "--max-batch-size": "batches are made by tokens; give --token-budget",
    "--output-path": "give --output FOLDER for run folders, or > FILE for what is printed",
    "--predict-only": "leave it out; answers are in the run folder, with --log-samples as lm-eval writes them",
    "--samples": "give --sample N, or --limit N",
    "--show-config": "evalkit ls tasks, or the run's manifest.json",
    "--system-instruction": "write it into a template file (docs/running.md), as --template FILE.yaml",
    "--use-cache": "leave it out; finished batches are kept, and the same command resumes",
    "--verbosity": "leave it out; evalkit --debug shows tracebacks",
    "--wandb-args": "leave it out; --format json prints every number",
    "--write-out": "give --show-prompts 1",
}
"""Option that evalkit does not have → what to do."""
_MODELS = ("hf", "hf-auto", "huggingface")
_ARGUMENTS = {
    "pretrained": "model", "revision": "revision", "tokenizer": "tokenizer", "dtype": "dtype", "device": "device",
    "attn_implementation": "attention", "max_length": "context",
}  # fmt: skip
"""Key of `--model_args` → evalkit's setting."""


def with_model_args(model: str | None, given: str | None, options: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the checkpoint and the settings that lm-eval's `--model hf --model_args key=value,…` mean.

    Raises:
        UsageError: another of lm-eval's models, a key without a setting of evalkit, or a setting given twice.
    """
    if given is None:
        if model in _MODELS and not Path(model).exists():
            raise UsageError(f"--model {model}: is lm-eval's; name the checkpoint: --model CKPT")
        return model, options
    if model not in (None, *_MODELS):
        raise UsageError(f"--model-args is for --model hf, as in lm-eval; here --model {model} is the checkpoint")
    settings: dict[str, Any] = {}
    for part in filter(None, given.split(",")):
        key, _, value = part.partition("=")
        if key == "trust_remote_code":
            raise UsageError(
                f"--model-args {part}: give --trust-remote-code itself, which lets the checkpoint's code run"
            )
        if key not in _ARGUMENTS:
            raise UnknownNameError("key of --model-args", key, _ARGUMENTS)
        if (name := _ARGUMENTS[key]) in settings or options.get(name) not in (None, "auto"):
            raise UsageError(f"--model-args {part}: {key} is given twice; give it once")
        if not value:
            raise UsageError(f"--model-args {part}: has no value; write it as {key}=VALUE")
        try:
            spec = model_spec(value) if name == "model" else model_spec("model", **{name: value})
            context_settings(spec.context)
        except UsageError as error:
            raise UsageError(f"--model-args {part}: {str(error).replace(f'--{name}', key)}") from error
        settings[name] = value
    return settings.pop("model", None), options | settings


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
