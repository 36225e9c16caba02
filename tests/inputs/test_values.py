"""Values that must not be rounded, truncated or reinterpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalkit.benchmarks.lm_eval.harness import Harness
from evalkit.benchmarks.needle.benchmark import NeedleRequest
from evalkit.benchmarks.request import SuiteRequest, request_of
from evalkit.errors import UsageError
from evalkit.models.loading.spec import ModelSpec, context_settings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": 2.7}, "--limit is 2.7; it must be a whole number"),
        ({"limit": 2.0}, "--limit is 2.0; it must be a whole number"),
        ({"limit": True}, "--limit is True; it must be a whole number"),
        ({"limit": "2.7"}, "--limit is '2.7'; it must be a whole number"),
        ({"limit": 0}, "--limit is 0; it must be at least 1"),
        ({"context": 4096.7}, "--context is 4096.7; it must be a whole number"),
        ({"context_original": "many"}, "--context-original is 'many'; it must be a whole number"),
        ({"num_fewshot": float("nan")}, "--num-fewshot is nan; it must be a whole number"),
        ({"token_budget": 512.5}, "--token-budget is 512.5; it must be a whole number, or auto"),
        ({"log_samples": "maybe"}, "--log-samples is 'maybe'; it must be True or False"),
        ({"trust_remote_code": "no"}, "--trust-remote-code is 'no'; it must be True or False"),
        ({"allow_pickle": 1}, "--allow-pickle is 1; it must be True or False"),
        ({"suite": ""}, "--suite is empty; leave it out"),
        ({"suite": ["zeroshot8"]}, r"--suite is \['zeroshot8'\]; it must be text"),
        ({"tasks": ""}, "--tasks is empty"),
        ({"tasks": ["piqa", ""]}, "--tasks is empty"),
        ({"tasks": ["piqa", 5]}, "--tasks is 5; it must be text"),
        ({"tasks": []}, "--tasks .*: contains no name; leave it out, or give at least one"),
        ({"tasks": ()}, "--tasks .*: contains no name; leave it out, or give at least one"),
        ({"tasks": ","}, "--tasks ,: contains no name; leave it out, or give at least one"),
        ({"tasks": [" "]}, "--tasks is empty"),
        ({"tasks": 5}, "--tasks is 5; it must be text"),
        ({"data_dir": ""}, "--data-dir is empty"),
        ({"data_dir": True}, "--data-dir is True; it must be text"),
        ({"data_dir": "a\0b"}, "--data-dir a.x00b: holds a NUL character"),
        ({"output": "a\udcff"}, "--output a.udcff: is not text in UTF-8"),
        ({"include_path": "~nobody-of-this-name/tasks"}, "there is no user of that name"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        request_of(SuiteRequest, "demo", options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": 300}, "--lengths 300: expected whole numbers, separated by commas"),
        ({"lengths": "100,x"}, "--lengths 100,x: expected whole numbers"),
        ({"depths": [True]}, "--depths True: expected numbers"),
        ({"repeats": 0}, "--repeats is 0; it must be at least 1"),
        ({"length": 3}, "unknown option 'length': did you mean 'lengths'"),
    ],
)
def test_a_benchmarks_own_settings(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        request_of(NeedleRequest, "demo", options)
    assert "model" not in str(caught.value)
    asked = request_of(NeedleRequest, "demo", {"lengths": "100, 200", "depths": (0, 50)})
    assert (asked.lengths, asked.depths) == ((100, 200), (0.0, 50.0))


def test_a_model_that_is_no_name() -> None:
    for model, said in (("", "--model is empty"), (5, "--model is 5; it must be text")):
        with pytest.raises(UsageError, match=said):
            request_of(SuiteRequest, model, {})  # type: ignore[arg-type]


def test_options_that_do() -> None:
    options = {"limit": np.int64(3), "context": "4096", "token_budget": "auto", "tasks": "piqa, boolq,", "suite": None,
               "data_dir": "here", "log_samples": True}  # fmt: skip
    spec = ModelSpec("./demo", context=4096)
    expected = SuiteRequest(spec, limit=3, tasks=("piqa", "boolq"), data_dir=Path("here"), log_samples=True)
    assert request_of(SuiteRequest, "./demo", options) == expected
    small = SuiteRequest(ModelSpec("demo"), tasks=("piqa",))
    assert request_of(SuiteRequest, Path("demo"), {"tasks": ("piqa",)}) == small


@pytest.mark.parametrize("options", [{"context": 4096.7}, {"context": True}, {"context": 8, "original": 1.5}])
def test_a_context_is_whole(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be a whole number"):
        context_settings(**options)


@pytest.mark.parametrize("name", ["allow_pickle", "trust_remote_code"])
def test_a_harness_trusts_only_what_is_true(checkpoint: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is 'no'; it must be True or False"):
        Harness(str(checkpoint), **{name: "no"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"add_bos_token": "no"}, "add_bos_token is 'no'; it must be True or False"),
        ({"revision": ""}, "--revision is empty"),
        ({"tokenizer": ""}, "--tokenizer is empty"),
        ({"device": ""}, "--device is empty"),
        ({"dtype": 5}, "--dtype is 5; it must be text"),
        ({"context_method": 5}, "--context-method is 5; it must be text"),
        ({"max_batch_size": 2.5}, "max_batch_size is 2.5; it must be a whole number"),
        ({"pretrained": None}, "--model is None; it must be text"),
        ({"pretrained": 5}, "--model is 5; it must be text"),
    ],
)
def test_a_harness_takes_what_fits(checkpoint: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Harness(**({"pretrained": str(checkpoint)} | options))


@pytest.mark.parametrize("options", [{"token_budget": 512.5}, {"batch_size": 2.5}, {"batch_size": "many"}])
def test_a_harness_takes_whole_numbers(checkpoint: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be a whole number, or auto"):
        Harness(str(checkpoint), **options)
