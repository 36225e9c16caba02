"""Options of the settings of a benchmark and of its model, made from their definitions (`inputs/settings.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from evalkit.cli.options import runs_folder
from evalkit.cli.parameters import FOLDER, SUITE, Command, Option, comma_separated, settings_of_option

if TYPE_CHECKING:
    from evalkit.inputs.settings import Setting

ORIGIN = ("revision", "tokenizer")
COMPUTING = ("device", "device_map", "dtype", "attention")
CONTEXT = ("context", "context_method", "context_original", "context_config")
SELECTION = ("sample", "seed", "limit")
TRUST = ("allow_pickle", "trust_remote_code")


class BenchmarkCommand(click.Command):
    """A command with an option for each setting of a benchmark and of its model.

    The benchmark is imported when the options are needed. `settings` says where in the list they are.

    Args:
        *arguments: as of `click.Command`, like `**more`.
        kind: the benchmark.
        without: settings without an option.
        **more: see `*arguments`.
    """

    def __init__(self, *arguments: Any, kind: str, without: Sequence[str] = (), **more: Any) -> None:
        self.kind, self.without = kind, without
        self._params: list[click.Parameter] | None = None
        super().__init__(*arguments, **more)

    @property
    def params(self) -> list[click.Parameter]:
        """Arguments and options, in the order of `--help`."""
        if self._params is None:
            self._params = [*self._expanded()]
        return self._params

    @params.setter
    def params(self, declared: list[Any]) -> None:
        self._declared, self._params = declared, None

    def _expanded(self) -> Iterator[click.Parameter]:
        from evalkit.benchmarks.registry import benchmark
        from evalkit.inputs.settings import settings_of
        from evalkit.models.spec import ModelSpec

        kind = benchmark(self.kind).request()
        known = settings_of(ModelSpec, kind)
        placed = {name for one in self._declared if isinstance(one, _Places) for name in one.names}
        others = [name for name in known if name not in placed and name not in self.without]
        for one in self._declared:
            if not isinstance(one, _Places):
                yield one
                continue
            for place in one.names:
                for name in others if isinstance(place, EllipsisType) else [place]:
                    yield _option_of(known[name], kind.default_texts.get(name, known[name].default_text))


class _Places:
    """Places in a command's list of parameters, for settings by name; `...`: those without a place."""

    def __init__(self, names: Sequence[str | EllipsisType]) -> None:
        self.names = names


def settings(*names: str | EllipsisType) -> Callable[[Command], Command]:
    """Put options of settings here in the list of a `BenchmarkCommand`; `...`: those without another place."""

    def add(command: Command) -> Command:
        declared: Any = command
        declared.__click_params__ = [*getattr(command, "__click_params__", ()), _Places(names)]
        return command

    return add


def _option_of(one: Setting, default_text: str) -> Option:
    hint, more = one.types[0], dict[str, Any]()
    default = one.default
    if hint is bool:
        more, default = {"is_flag": True}, None
    elif get_origin(hint) is Literal:
        more = {"type": click.Choice(get_args(hint))}
    elif get_origin(hint) is tuple and get_args(hint)[0] is Path:
        more, default = {"type": FOLDER, "multiple": True}, None
    elif get_origin(hint) is tuple:
        more, default = {"callback": comma_separated}, ",".join(f"{value:g}" for value in default) or None
    elif hint is int and not one.word:
        more = {"type": int}
    elif hint is Path:
        more = {"type": FOLDER}
    elif one.name == "suite":
        more = {"type": SUITE}
    if one.name == "output":
        more["callback"] = runs_folder
    if default is not None:
        more |= {"default": default, "show_default": True}
    text = f"{one.help}  [default: {default_text}]" if default_text else one.help
    names = [one.flag, *([one.short] if one.short else [])]
    return Option(names, **settings_of_option(names, one.has_variable, help=text, metavar=one.metavar, **more))
