"""Settings: fields of request dataclasses and parameters of commands, each of them the one definition of a setting.

In: a dataclass whose fields are made by `setting`. Out: its `Setting`s, from which come the options of the command line
(`cli/parameters.py`), the keywords of `evaluate`, `harness` and the training callback, the keys of study files and
docs/reference/settings.md; and values that are validated.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache, wraps
from pathlib import Path
from textwrap import wrap
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from evalkit.errors import UnknownNameError, UsageError, check_known
from evalkit.inputs.values import name_or_path, names, path, switch, whole

Names = Literal["text", "name or file", "file", "folder"]
NOT_SETTINGS = ("model", "earlier")
"""Fields of a request that are set by the code that makes it."""


@dataclass(frozen=True)
class Setting:
    """A setting, and what is said about it wherever it can be set."""

    name: str
    default: Any
    types: tuple[Any, ...]
    """Types of its values, without None."""
    help: str = ""
    default_text: str = ""
    """What None or an empty list stands for, as users read it."""
    metavar: str | None = None
    option: str = ""
    """Option on the command line; empty: that of its name."""
    short: str | None = None
    least: int = 1
    most: int | None = None
    """Smallest and largest whole number."""
    shows_least: bool = False
    """Whether `--help` has the smallest and the largest number."""
    word: str = ""
    """Word in place of a number; it stands for None unless it is one of the types."""
    names: Names = "text"
    """What a string or path names. The paths of files and folders in a study file are relative to it."""
    has_variable: bool = True
    """Whether `EVALKIT_<NAME>` sets the option."""
    repeated: bool = False
    """Whether the option of a list is given again for each of its values, which are else separated by commas."""
    argument: bool = False
    required: bool = False

    @property
    def flag(self) -> str:
        return self.option or f"--{self.name.replace('_', '-')}"

    def is_file_at(self, location: Path) -> bool:
        """Return whether a string as its value means the file or folder of that path, which then exists."""
        is_path = self.names == "text" and Path in (self.types[0], *get_args(self.types[0]))
        may_be_file, may_be_folder = is_path or self.names == "file", is_path or self.names == "folder"
        return (may_be_file and location.is_file()) or (may_be_folder and location.is_dir())


def setting(default: Any, help: str = "", default_text: str = "", **more: Any) -> Any:
    """Return a field of a request, or the default of a command's parameter; arguments as the fields of `Setting`."""
    return field(default=default, metadata={"help": help, "default_text": default_text, **more})


def setting_of(name: str, hint: Any, declared: Field[Any]) -> Setting:
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kept = tuple(member for member in types if member is not NoneType)
    return Setting(name, declared.default, kept, **declared.metadata)


def settings_of(*kinds: type) -> Mapping[str, Setting]:
    """Return name → setting of the fields of dataclasses, other than `NOT_SETTINGS`."""
    hashable: Any = kinds
    return _settings_of(hashable)


@cache
def _settings_of(kinds: Any) -> Mapping[str, Setting]:
    settings: dict[str, Setting] = {}
    for kind in kinds:
        hints: dict[str, Any] = get_type_hints(kind)
        settings |= {item.name: setting_of(item.name, hints[item.name], item) for item in fields(kind)}
    return {name: definition for name, definition in settings.items() if name not in NOT_SETTINGS}


def check_names(names: Collection[str], *kinds: type) -> None:
    """Raise an `UnknownNameError` for a name that is no setting of the dataclasses."""
    known = settings_of(*kinds)
    check_known("option", names, known)


def given_settings(given: Mapping[str, Any], *kinds: type) -> dict[str, Any]:
    """Return the values that are not the default: an empty list of names, for example, is all of them.

    Values without a setting of these dataclasses are kept.
    """
    known = settings_of(*kinds)

    def is_default(default: Any, value: Any) -> bool:
        if isinstance(default, tuple):
            return not default and not value
        return type(value) is type(default) and value == default

    return {
        name: value
        for name, value in given.items()
        if value is not None and not (name in known and is_default(known[name].default, value))
    }


_SWITCHES = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
"""Words for booleans, as on the command line."""


def switched(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    flags = {item.name for item in settings_of(kind).values() if item.types == (bool,)}
    return {
        name: _SWITCHES.get(value.lower(), value) if name in flags and isinstance(value, str) else value
        for name, value in given.items()
    }


def fitted(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Validate values of settings by name; None is omitted."""
    known = settings_of(kind)
    return {name: _fitted(known[name], value) for name, value in given.items() if value is not None}


def _fitted(definition: Setting, value: Any) -> Any:
    flag, hint = definition.flag, definition.types[0]
    if hint is bool:
        return switch(flag, value)
    if hint is int:
        if definition.word and value == definition.word:
            return None if len(definition.types) == 1 else definition.word
        return whole(flag, value, definition.least, definition.word and f", or {definition.word}")
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UnknownNameError(definition.name, str(value), get_args(hint))
        return value
    if get_origin(hint) is not tuple:
        return path(flag, value) if hint is Path else name_or_path(flag, value)
    each = get_args(hint)[0]
    if each is str:
        return names(flag, value)
    if each is Path:
        return tuple(path(flag, item) for item in (value if isinstance(value, (list, tuple)) else [value]))
    listed = names(flag, value) if isinstance(value, str) else value
    try:
        if any(isinstance(item, bool) for item in listed):
            raise TypeError
        return tuple(whole(flag, _units(item), definition.least) if each is int else float(item) for item in listed)
    except (TypeError, ValueError):
        shown = ",".join(map(str, listed)) if isinstance(listed, (list, tuple)) else repr(listed)
        raise UsageError(f"{flag} {shown}: expected numbers, separated by commas") from None


def _units(item: Any) -> Any:
    """Return a number of tokens that is written as 4k as 4096, as lengths of contexts are named."""
    return 1024 * int(item[:-1]) if isinstance(item, str) and re.fullmatch(r"\d+[kK]", item) else item


Given = ParamSpec("Given")
Result = TypeVar("Result")


def with_settings(types: type, *kinds: type) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Add settings to the signature of a function with `**keywords`, and to its documentation in place of `{settings}`.

    `types` is the `TypedDict` of the keywords, which are settings of the dataclasses.
    """
    known = settings_of(*kinds)
    added = {name: getattr(hint, "__forward_arg__", hint) for name, hint in types.__annotations__.items()}

    def add(function: Callable[Given, Result]) -> Callable[Given, Result]:
        own, keyword = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
        parameters = [item for item in own.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
        # A type checker takes a setting that is also an argument by its position as positional only
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [item.replace(kind=either) if item.name in added else item for item in parameters]
        for name, hint in added.items():
            if name in own.parameters:
                continue
            parameters.append(inspect.Parameter(name, keyword, default=known[name].default, annotation=hint))
        signature = own.replace(parameters=parameters)

        @wraps(function)
        def called(*args: Given.args, **keywords: Given.kwargs) -> Result:
            if unknown := keywords.keys() - signature.parameters.keys():
                what = f"argument of {function.__qualname__.removesuffix('.__init__')}"
                raise TypeError(str(UnknownNameError(what, min(unknown), signature.parameters.keys() - {"self"})))
            return function(*args, **keywords)

        called.__signature__ = signature  # type: ignore[attr-defined]
        lines = "\n".join(_documented(known[name]) for name in added).lstrip()
        called.__doc__ = (function.__doc__ or "").replace("{settings}", lines)
        return called

    return add


def _documented(definition: Setting) -> str:
    ending = f" Default: {definition.default_text}." if definition.default_text else ""
    text = f"{definition.name}: {definition.help}{ending}"
    return "\n".join(wrap(text, 108, initial_indent=" " * 8, subsequent_indent=" " * 12))
