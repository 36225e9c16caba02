"""Rules of this repository that no linter knows: `python -m tests.lint`, a part of `make check`.

In: the package, its documentation and settings. Out: a line for each problem, and exit code 1 if there is one.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click

from evalkit.cli.root import cli

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "evalkit"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETTINGS = sorted(path for folder in ("configs", "tasks", "results/published") for path in (ROOT / folder).rglob("*")
                  if path.is_file() and path.suffix != ".csv")  # fmt: skip
SCRIPTS = [
    path
    for folder in ("benchmarks", "examples", "examples/pretrain", "examples/pretrain/recipe", "examples/replication")
    for path in sorted((ROOT / folder).glob("[!.]*.*"))
]

AVOIDED = (
    "mend(s|ed|ing)?", "told", "lets? be", "held (to|against)", "whereabouts", "parted", "wanted", "likeliest",
    "refuses? what cannot be", "goes round", "what nobody asked", "carried off", "taken in",
)  # fmt: skip
_AVOIDED = re.compile(
    "(?<![a-z])(" + "|".join(AVOIDED).replace(" ", r"[\s_#*]+") + ")(?![a-z])", re.IGNORECASE
)  # whole words, in identifiers between underscores too; a phrase may span two lines
UNCLEAR = ("one", "found", "place")
"""Variables that say nothing."""

FOREIGN = re.compile(
    r"install [^\n`#]*(?<![-\w/.])evalkit(?![-\w/.])"  # pip install evalkit, "reinstall evalkit"
    r"|(?<![-\w])evalkit\[\w"  # an extra of it
    r"|\bversion\([\"']evalkit[\"']\)|package_name="  # its version, from the installed metadata
)
"""Installs or reads the other project that is called evalkit on the package index."""

NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}
"""Public, with an underscore so that they are no field's name."""
PRIVATE = {
    # The module is copied into exported checkpoints, which load without evalkit
    ("models/variants/attention.py", "_attn_implementation"),
    # transformers documents overriding it, to initialise the weights of a model of one's own
    ("models/variants/modeling.py", "_init_weights"),
}
"""(module, name) of other libraries' private names outside of evalkit/compatibility."""
OVERRIDES = {"_init_weights", "_supports_flex_attn"}
"""Private names of other libraries' classes that evalkit's classes define, as transformers documents."""
PUBLIC = {
    "lm_eval": {"lm_eval", "lm_eval.tasks", "lm_eval.evaluator", "lm_eval.api.model", "lm_eval.api.registry",
                "lm_eval.models.huggingface"},
    "transformers": {"transformers", "transformers.cache_utils", "transformers.initialization",
                     "transformers.integrations.sdpa_attention", "transformers.masking_utils",
                     "transformers.modeling_utils", "transformers.models.gpt_neox", "transformers.models.llama",
                     "transformers.models.llama.modeling_llama", "transformers.models.qwen2", "transformers.utils"},
}  # fmt: skip
"""Modules with a documented use: models, caches and attention functions of one's own, and logging."""
CAPABILITIES = ("attention", "longcontext")
"""Folders of the package that the core does not import, not even for type checkers: it names their objects."""
REGISTERED = re.compile(rf'^ *("[^"]+": )?"(evalkit\.(?:{"|".join(CAPABILITIES)})\.[\w.]+:\w+)",$')
"""The line of a registry that names an object of a capability."""
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"`((?:evalkit|tests|configs|benchmarks|examples)/[\w/.-]*\.(?:py|ya?ml|md|json))`")
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def language() -> Iterator[str]:
    """Yield avoided words, docstrings that do not begin with a short sentence, and class names that occur twice."""
    for path in [*PAGES, *SETTINGS, *SCRIPTS, *MODULES]:
        yield from (f"{name(path)}: '{match[0]}'" for match in _AVOIDED.finditer(f"{name(path)}\n{read(path)}"))
    classes: Counter[str] = Counter()
    for module in [*MODULES, *(path for path in SCRIPTS if path.suffix == ".py")]:
        for node in ast.walk(ast.parse(read(module))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or ".").splitlines()[0]
                if not first.endswith(".") or len(first) > 120:
                    yield f"{name(module)}: a docstring does not begin with a sentence of one line: {first}"
            if isinstance(node, ast.ClassDef) and module in MODULES:
                classes[node.name] += 1
    yield from (f"{count} classes are called {kind}" for kind, count in classes.items() if count > 1)


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__") and word not in NAMED_TUPLE


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield private names, except a class's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield from filter(is_private, [node.attr])
        elif isinstance(node, ast.ImportFrom):
            yield from filter(is_private, [*(node.module or "").split("."), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Import):
            yield from filter(is_private, [part for alias in node.names for part in alias.name.split(".")])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "getattr", "hasattr", "setattr", "delattr", "object", "attrgetter",
        ):  # fmt: skip
            texts = [part.value for part in node.args if isinstance(part, ast.Constant)]
            yield from filter(is_private, [text for text in texts if isinstance(text, str)])


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def other_libraries() -> Iterator[str]:
    """Yield private names and internal modules of other libraries that are used outside of evalkit/compatibility."""
    for path in MODULES:
        module, tree = path.relative_to(PACKAGE).as_posix(), ast.parse(read(path))
        if module.startswith("compatibility/"):
            continue
        for word in private_names(tree):
            if (module, word) not in PRIVATE:
                yield f"evalkit/{module}: {word} is private"
        for used in imported(tree):
            if used not in PUBLIC.get(used.split(".")[0], {used}):
                yield f"evalkit/{module}: {used} is an internal module of another library"


def capabilities() -> Iterator[str]:
    """Yield imports of a capability from outside its folder, and its names in the core that are no registry's lines."""
    for path in MODULES:
        folder = path.relative_to(PACKAGE).parts[0]
        others = tuple(f"evalkit.{each}" for each in CAPABILITIES if each != folder)
        tree = ast.parse(read(path))
        names = [f"{node.module}.{alias.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                 for alias in node.names]  # fmt: skip
        for used in {*imported(tree), *names}:
            if used.startswith(others):
                yield f"{name(path)}: {used} is imported from outside of its folder"
        for line in read(path).splitlines() if folder not in CAPABILITIES else ():
            if any(other in line for other in others) and not REGISTERED.match(line):
                yield f"{name(path)}: {line.strip()}: expected a line for each name of a capability"


def overrides() -> Iterator[str]:
    """Yield private names of other libraries' classes that evalkit's classes define, by inheritance too."""
    for about in pkgutil.walk_packages([str(PACKAGE)], "evalkit."):
        if about.name == "evalkit.__main__":
            continue
        for _, kind in inspect.getmembers(import_module(about.name), inspect.isclass):
            if kind.__module__ != about.name:
                continue
            theirs = [base for base in kind.__mro__ if base.__module__.split(".")[0] in ("transformers", "lm_eval")]
            ours = [base for base in kind.__mro__ if base.__module__.startswith("evalkit.")]
            # Without what Python and, once a class has been used, transformers store in it
            names = {word for base in ours for word in vars(base) if is_private(word)} - OVERRIDES
            names -= {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}
            for word in sorted(names):
                if not word.endswith("_cached_value") and any(word in vars(base) for base in theirs):
                    yield f"{about.name}: {kind.__name__}.{word} overrides another library's"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as on GitHub."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", read(page)), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading.lower())) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def commands(page: Path) -> list[list[str]]:
    """Return the words of each `evalkit` command on a code line, without its comment."""
    text = read(page)
    shell = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^    (?:\$ )?evalkit (.*)$", text + textwrap.indent(shell, "    "), re.MULTILINE)
    return [re.split(r"\s+#|\s{3,}", line)[0].replace("[", "").replace("]", "").split() for line in lines]


def unknown_options(words: list[str]) -> set[str]:
    """Return what of a command line does not exist."""
    given, command = list(words), cli
    while isinstance(command, click.Group) and given and given[0] in command.commands:
        command = command.commands[given.pop(0)]
    if command is cli and words[:1] not in ([], ["--help"]):
        return set(words[:1])
    # `evalkit longbench` runs a command of its group where none is named
    members = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
    known = {option for member in members for parameter in member.params for option in parameter.opts}
    asked = {word.partition("=")[0].replace("_", "-") for word in given if re.match("--?[a-z]", word)}
    return asked - known


def documentation() -> Iterator[str]:
    """Yield links and paths that lead nowhere, commands that do not exist, and pages that no index names."""
    for page in PAGES:
        for link in _LINK.findall(_FENCED.sub("", read(page))):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                yield f"{name(page)}: the link {link} leads nowhere"
        for path in _PATH.findall(read(page)):
            if not ((ROOT / path).exists() or (PACKAGE / path).exists()):
                yield f"{name(page)}: {path} does not exist"
        for words in commands(page):
            if unknown := unknown_options(words):
                yield f"{name(page)}: evalkit {' '.join(words)}: unknown {', '.join(sorted(unknown))}"
    readme = read(ROOT / "README.md").splitlines()
    if len(readme) > 110 or max(map(len, readme)) > 120:
        yield "README.md: more than 110 lines, or a line of more than 120 characters"
    linked = {
        (ROOT / "docs" / link.partition("#")[0]).resolve() for link in _LINK.findall(read(ROOT / "docs/README.md"))
    }
    yield from (f"docs/README.md does not name {name(page)}" for page in PAGES[1:]
                if page.resolve() not in linked and page.name != "README.md")  # fmt: skip
    others = ["CHANGELOG.md", "pyproject.toml", "Makefile", "constraints.txt"]
    for path in [*PAGES, *SETTINGS, *SCRIPTS, *MODULES, *(ROOT / other for other in others)]:
        yield from (f"{name(path)}: {match[0]}: the name belongs to another project"
                    for match in FOREIGN.finditer(read(path)))  # fmt: skip


def unclear_variables() -> Iterator[str]:
    """Yield the assignments to unclear variables, in loops and comprehensions too; a class's fields are none."""
    for module in set(MODULES) - {PACKAGE / "data/lm_eval_dataset.py"}:  # its source text is a part of run ids
        tree = ast.parse(read(module))
        fields = [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
        stored = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        for node in stored:
            if node.id in UNCLEAR and node not in fields:
                yield f"{name(module)}:{node.lineno}: the variable {node.id} says nothing; give it a noun"


def forms_of_errors() -> Iterator[str]:
    """Yield places that write "±" before a number by themselves."""
    for module in set(MODULES) - {PACKAGE / "reporting/numbers.py"}:
        if re.search("±\\s*([{']|\"(?!:))", read(module)):
            yield f"{name(module)}: ± before a number is written by evalkit/reporting/numbers.py only"


def main() -> int:
    rules = (
        language,
        other_libraries,
        capabilities,
        overrides,
        documentation,
        unclear_variables,
        forms_of_errors,
    )
    problems = [problem for rule in rules for problem in rule()]
    print(*problems, sep="\n", end="\n" * bool(problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
