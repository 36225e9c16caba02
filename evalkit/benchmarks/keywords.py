"""Keywords of `evaluate`, `harness` and the training callback, for type checkers.

Generated from the settings by `python -m tests.generated`; a test compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict


class SuiteSettings(TypedDict, total=False):
    """Settings of a run of a suite."""

    output: str | Path
    name: str | None
    token_budget: int | Literal["auto"] | None
    sample: int | None
    seed: int | None
    limit: int | None
    suite: str | Path | None
    tasks: str | Sequence[str]
    requests: str | Path | None
    include_path: str | Path | None
    template: str | Path | None
    rule: str | None
    num_fewshot: int | None
    vary: str | Path | Sequence[str]
    control: Literal["swap"] | None
    data_dir: str | Path | None
    log_samples: bool
    allow_unofficial_data: bool


class LoadingSettings(TypedDict, total=False):
    """Settings that a model is loaded with, without the tokenizer."""

    revision: str | None
    device: str
    device_map: Literal["none", "auto"]
    dtype: str
    attention: Literal["auto", "sdpa", "eager"]
    quantise: str | None
    context: int | Literal["none"] | None
    context_method: str | None
    context_original: int | None
    context_config: str | Path | None
    allow_pickle: bool
    trust_remote_code: bool


class EvaluateSettings(SuiteSettings, LoadingSettings):
    """Settings of `evaluate`."""
