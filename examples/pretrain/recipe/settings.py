"""The settings file of a training, and that of a study of several trainings.

In: a YAML file. Out: `Recipe` or `TrainingStudy`, whose paths are relative to the file. docs/pretraining.md lists the
keys.
"""

from __future__ import annotations

import re
from glob import escape, glob
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from evalkit.errors import EvalkitError, UsageError
from evalkit.inputs.validated import FileSettings, Listed, NonEmpty, read_settings
from evalkit.models.zoo.named import named_model

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
LARGEST_SEED = 2**32 - 1
"""Of numpy's global generator, which transformers seeds."""
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
_NAME = re.compile(r"[\w-][\w.-]*")
"""A model's name in a study, with which the name of a folder begins."""


class Text(FileSettings):
    """One source of text: files, or a data set of the Hugging Face hub."""

    files: Listed[NonEmpty] = ()
    """.jsonl files, of which each line is a document; any other file is one document."""
    dataset: NonEmpty | None = None
    """Name on the hub, or of one of `datasets`' builders ("json", "parquet", …) with `data_files`."""
    config: NonEmpty | None = None
    data_files: NonEmpty | None = None
    """A pattern: of local files for a builder, of files of its repository for a data set of the hub."""
    split: NonEmpty = "train"
    key: NonEmpty = "text"
    """Of a document's text."""
    tokens: Count | None = None
    """Tokens after which the rest is left out; none: all of it."""

    @model_validator(mode="after")
    def _one_source(self) -> Text:
        if bool(self.files) == (self.dataset is not None):
            raise ValueError("give either files or dataset")
        return self

    @property
    def pattern(self) -> str | None:
        """The pattern of local files; None without one. Names of data sets of the hub have a slash."""
        local = self.data_files and "://" not in self.data_files and "/" not in (self.dataset or "/")
        return self.data_files if local else None


class Evaluation(FileSettings):
    """An evaluation of the model during its training, by evalkit.TrainerCallback."""

    suite: NonEmpty = "zeroshot8"
    sample: Count | None = None
    every: Count | None = None
    """Updates between evaluations; none: only at the end."""


class Recipe(FileSettings):
    """All that determines the weights at the end, but for the seed."""

    model: NonEmpty = ""
    """A name of `evalkit models ls`, or FILE.yaml:NAME; none where the command or the study names one."""
    tokenizer: NonEmpty | None = None
    """A folder or a hub name; none: trained on the files of `text`."""
    text: Annotated[Listed[Text], Field(min_length=1)]
    held_out: Listed[Text] = ()
    length: Annotated[int, Field(ge=2)]
    """Tokens of a row."""
    batch: Count
    """Rows of an update, over all processes."""
    micro_batch: Count | None = None
    """Rows that a process computes at once; none: all of its own."""
    steps: Count
    """Updates."""
    optimizer: Literal["adamw_torch", "adamw_torch_fused"] = "adamw_torch_fused"
    learning_rate: Annotated[float, Field(gt=0)]
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["cosine", "linear", "constant_with_warmup"] = "cosine"
    """Of the learning rate after the warm-up; the first two reach 0 after the last update."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: tuple[Share, Share] = Field((0.9, 0.95), strict=False)
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: mixed precision, with weights and optimizer in float32."""
    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    log_every: Count = 10
    held_out_every: Count | None = None
    """Updates between measurements of the held-out loss; none: only at the end."""
    held_out_rows: Count = 128
    """Rows of held-out text that are measured, spread over it."""
    evaluate: Evaluation | None = None
    save_every: Count = 500
    keep: Count | None = None
    """Checkpoints that are kept; none: all."""
    report_to: Literal["installed", "none"] = "installed"
    """Also log to TensorBoard and wandb, where they are installed."""

    @property
    def tokens(self) -> int:
        """Tokens that the training reads, with repetitions."""
        return self.steps * self.batch * self.length


class StudiedModel(FileSettings):
    """A model with settings of its own."""

    model: NonEmpty
    recipe: NonEmpty


class TrainingStudy(FileSettings):
    """Several models and seeds under the same settings, or under those of their sizes."""

    recipe: NonEmpty
    """Settings file, whose `model`, if it has one, each of `models` replaces."""
    models: Annotated[dict[str, NonEmpty | StudiedModel], Field(min_length=1)]
    """By name, which the output folders begin with; a model may have another `recipe`."""
    seeds: Annotated[Listed[Seed], Field(min_length=1)]
    output: NonEmpty
    """Folder of the trainings."""

    @field_validator("models")
    @classmethod
    def _folder_names(cls, models: dict[str, str | StudiedModel]) -> dict[str, str | StudiedModel]:
        for name in models:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"the name {name!r} is no folder's: use letters, digits, '_', '-' and '.', the last not first"
                )
        return models


def read_recipe(path: Path, model: str | None = None) -> Recipe:
    """Read a training's settings, with a model in place of theirs if it is given.

    Raises:
        UsageError: the file cannot be read or is invalid, or names a model or a text file that does not exist, or
            there is no model.
    """
    recipe = read_settings(path, Recipe, UsageError)
    if not (model or recipe.model):
        raise UsageError(f"{path}: it lacks 'model'; add it, give --model, or name models in a study (train_study.py)")
    found = {
        "model": model or _model(path, "model", recipe.model),
        "text": _texts(path, "text", recipe.text),
        "held_out": _texts(path, "held_out", recipe.held_out),
    }
    if recipe.tokenizer:
        found["tokenizer"] = _beside(path, recipe.tokenizer)
    return recipe.model_copy(update=found)


def read_training_study(path: Path) -> tuple[TrainingStudy, dict[str, Recipe]]:
    """Read a study of trainings, and the recipe of each of its models.

    Raises:
        UsageError: a file cannot be read or is invalid, or names a model or a text file that does not exist.
    """
    study = read_settings(path, TrainingStudy, UsageError)
    recipes = {}
    for name, given in study.models.items():
        model, file = (given, study.recipe) if isinstance(given, str) else (given.model, given.recipe)
        recipes[name] = read_recipe(path.parent / file, _model(path, f"models.{name}", model))
    return study.model_copy(update={"output": str(path.parent / study.output)}), recipes


def _model(path: Path, key: str, given: str) -> str:
    model = _beside(path, given)
    try:
        named_model(model)
    except EvalkitError as error:
        raise UsageError(f"{path}: '{key}': {error}") from error
    return model


def _texts(path: Path, key: str, texts: tuple[Text, ...]) -> tuple[Text, ...]:
    found = []
    for number, text in enumerate(texts):
        files = [path.parent / Path(file).expanduser() for file in text.files]
        if absent := [str(file) for file in files if not file.is_file()]:
            raise UsageError(f"{path}: '{key}[{number}].files': {absent[0]} is no file")
        near = {"data_files": _pattern(path, f"{key}[{number}].data_files", text.pattern)} if text.pattern else {}
        found.append(text.model_copy(update={"files": tuple(map(str, files)), **near}))
    return tuple(found)


def _pattern(path: Path, key: str, given: str) -> str:
    """Return a pattern relative to the settings file's folder, of at least one file."""
    near = str(Path(escape(str(path.parent))) / Path(given).expanduser())
    if not any(Path(file).is_file() for file in glob(near, recursive=True)):  # noqa: PTH207
        raise UsageError(f"{path}: '{key}': no file matches {near}")
    return near


def _beside(path: Path, given: str) -> str:
    """Return a path relative to the settings file's folder if it exists there, else the name unchanged."""
    file, colon, name = given.rpartition(":") if ":" in given else (given, "", "")
    near = path.parent / Path(file).expanduser()
    return f"{near}{colon}{name}" if near.exists() else given
