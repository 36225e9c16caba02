"""A name that another release removed ends in a one-line error that says what to install."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evalkit.compatibility import lm_eval, names, transformers
from evalkit.compatibility.torch import compiled, hooks_of
from evalkit.errors import EvalkitError

GONE = SimpleNamespace(device="cpu")
USES: dict[str, Callable[[], Any]] = {
    "transformers SimpleNamespace._gone": lambda: names.attribute("transformers", SimpleNamespace(), "_gone"),
    "transformers json._gone": lambda: names.module("transformers", "json._gone"),
    "transformers with other parameters": lambda: names.call("transformers", lambda one: one, 1, 2),
    "lm-eval SimpleNamespace._index": lambda: lm_eval.replace_index(GONE, {}),
    "lm-eval SimpleNamespace._factory": lambda: lm_eval.wrap_building(GONE, lambda build: build),
    "transformers SimpleNamespace._attn_implementation": lambda: transformers.select_attention(GONE, "sdpa"),
    "transformers SimpleNamespace._is_stateful": lambda: transformers.keeps_state(GONE),
    "transformers SimpleNamespace._prepare_generation_config": lambda: transformers.generation_config_of(GONE, {}),
    "torch SimpleNamespace._forward_pre_hooks": lambda: hooks_of(GONE),
}


@pytest.mark.parametrize("use", USES)
def test_what_is_gone(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "version", lambda _: "99.1")
    package, _, noun = use.partition(" ")
    works = f"pip install {package}=={names.KNOWN[package]}"
    with pytest.raises(EvalkitError, match=rf"^{package} 99\.1 has .*{noun}.*{works}$"):
        USES[use]()


def test_errors_of_a_function_or_a_module_itself_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_another.py").write_text("import no_such_library", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        names.module("transformers", "needs_another")

    def refusing(value: int) -> None:
        raise TypeError("not that")

    with pytest.raises(TypeError, match="not that"):
        names.call("transformers", refusing, 1)


def test_the_versions_are_those_that_tests_run_with() -> None:
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    assert all(f"{package}=={version}\n" in lines for package, version in names.KNOWN.items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_what_is_inside_of_a_compiled_module() -> None:
    module = torch.nn.Linear(2, 2)
    assert compiled(torch.compile(module)) is module
    assert compiled(module) is compiled(torch.nn.Sequential(module)) is None
