"""Lookup of other libraries' private names, which any release may remove.

In: an object or a module, and a name. Out: the attribute, or an `EvalkitError` with the installed version, the version
that works, and the command that installs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from evalkit.errors import EvalkitError

KNOWN = {"gguf": "0.19.0", "lm-eval": "0.4.13", "torch": "2.13.0", "transformers": "5.23.0"}
"""Distribution → version that evalkit's tests run with."""


def attribute(package: str, owner: Any, name: str) -> Any:
    """Return an attribute of a library's object. Raises `EvalkitError` if there is none."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        holder = owner if isinstance(owner, (type, ModuleType)) else type(owner)
        raise _incompatible(package, f"has no {holder.__name__}.{name}") from error


def module(package: str, name: str) -> ModuleType:
    """Import a module of a library. Raises `EvalkitError` if it has no such module."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # A missing dependency of the library is another error
        if error.name is None or not name.startswith(error.name):
            raise
        raise _incompatible(package, f"has no module {name}") from error


def call(package: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a library's function after `check_parameters`, which may raise."""
    check_parameters(package, function, *arguments, **options)
    return function(*arguments, **options)


def check_parameters(package: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Raise `EvalkitError` if a library's function, or a class's constructor, does not accept some arguments."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise _incompatible(package, f"has {name} with other parameters ({error})") from error


@contextmanager
def replaced(package: str, owner: Any, **replacements: Callable[[Any], Any]) -> Iterator[None]:
    """Replace attributes of a library's object within the block, each by the result of a function of it."""
    originals = {name: attribute(package, owner, name) for name in replacements}
    inherited = {name for name in replacements if name not in vars(owner)}
    try:
        for name, replacement in replacements.items():
            setattr(owner, name, replacement(originals[name]))
        yield
    finally:
        for name, original in originals.items():
            if name in inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _incompatible(package: str, what: str) -> EvalkitError:
    try:
        installed = version(package)
    except PackageNotFoundError:
        installed = "(of unknown version)"
    works = KNOWN[package]
    return EvalkitError(
        f"{package} {installed} {what}, which evalkit uses; it works with {package} {works}: "
        f"pip install {package}=={works}"
    )
