"""Private names and internal modules of other libraries are used in evalkit/compatibility only."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import evalkit

PACKAGE = Path(evalkit.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "compatibility" not in path.relative_to(PACKAGE).parts)

NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}
"""Public, with an underscore so that they are no field's name."""
EXPORTED = "the module is copied into exported checkpoints, which load without evalkit"
EXTENSION = "transformers documents overriding it, to initialise the weights of a model of one's own"
EXCEPTIONS = {
    ("models/variants/attention.py", "_attn_implementation"): EXPORTED,
    ("models/variants/modeling.py", "_init_weights"): EXTENSION,
}
"""(module, name) → why it may be used there."""
OVERRIDES = {
    "_init_weights": EXTENSION,
    "_supports_flex_attn": "transformers documents it as what a model's class says of its attention",
}
"""Names of other libraries' classes that evalkit's classes define, with the reason."""
PUBLIC = {
    "lm_eval": {"lm_eval", "lm_eval.tasks", "lm_eval.evaluator", "lm_eval.api.model", "lm_eval.api.registry",
                "lm_eval.models.huggingface"},
    "transformers": {"transformers", "transformers.cache_utils", "transformers.initialization",
                     "transformers.integrations.sdpa_attention", "transformers.masking_utils",
                     "transformers.modeling_utils", "transformers.models.gpt_neox", "transformers.models.llama",
                     "transformers.models.llama.modeling_llama", "transformers.models.qwen2", "transformers.utils"},
}  # fmt: skip
"""Modules with a documented use: models, caches and attention functions of one's own, and logging."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield private names, except a class's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own:
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from filter(private, [*(node.module or "").split("."), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Import):
            yield from filter(private, [part for alias in node.names for part in alias.name.split(".")])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "getattr", "hasattr", "setattr", "delattr", "object", "attrgetter",
        ):  # fmt: skip
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            yield from filter(private, texts)


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize(
    "code",
    ["model._x", "model.part()._x = 1", "super()._x()", "from a._x import b", "from a import _x", "import a._x",
     "getattr(model, '_x', None)", "patch.object(model, '_x', 1)"],
)  # fmt: skip
def test_what_counts_as_private(code: str) -> None:
    assert list(private_names(ast.parse(code))) == ["_x"]


def test_private_names_stand_in_the_compatibility_modules_only() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in SOURCES
        for name in private_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == EXCEPTIONS.keys()


def test_internal_modules_are_imported_by_the_compatibility_modules_only() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in SOURCES
        for name in imported(ast.parse(path.read_text(encoding="utf-8")))
        if name not in PUBLIC.get(name.split(".")[0], {name})
    }
    assert not found


def test_only_documented_methods_are_overridden() -> None:
    found = set()
    for about in pkgutil.walk_packages([str(PACKAGE)], "evalkit."):
        if about.name == "evalkit.__main__":
            continue
        for _, kind in inspect.getmembers(import_module(about.name), inspect.isclass):
            if kind.__module__ != about.name:
                continue
            others = [base for base in kind.__mro__ if base.__module__.split(".")[0] in ("transformers", "lm_eval")]
            # Also what a class of evalkit's brings that is mixed into one of theirs
            own = [base for base in kind.__mro__ if base.__module__.startswith("evalkit.")]
            names = {name for base in own for name in vars(base) if private(name)}
            # What Python itself and its own libraries define of every class
            names -= {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}
            # What transformers stores in a class once it has been used
            names = {name for name in names if not name.endswith("_cached_value")}
            found |= {name for name in names if any(name in vars(base) for base in others)}
    assert found == OVERRIDES.keys()
