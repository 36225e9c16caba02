"""Document schemas of the eight tasks and their few-shot examples: official sources, canonical fields, content hashes.

In: source records in the fields of the original dataset. Out: canonical documents, in the fields that lm-eval 0.4.13's
task files read; and the hash of the content that determines an evaluation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from evalkit.data.sources import Record
from evalkit.errors import DataError
from evalkit.inputs.validated import Stored, validated
from evalkit.inputs.values import LONGEST_TEXT

_SUBJECTS = """
    abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology college_chemistry
    college_computer_science college_mathematics college_medicine college_physics computer_security
    conceptual_physics econometrics electrical_engineering elementary_mathematics formal_logic global_facts
    high_school_biology high_school_chemistry high_school_computer_science high_school_european_history
    high_school_geography high_school_government_and_politics high_school_macroeconomics high_school_mathematics
    high_school_microeconomics high_school_physics high_school_psychology high_school_statistics
    high_school_us_history high_school_world_history human_aging human_sexuality international_law jurisprudence
    logical_fallacies machine_learning management marketing medical_genetics miscellaneous moral_disputes
    moral_scenarios nutrition philosophy prehistory professional_accounting professional_law professional_medicine
    professional_psychology public_relations security_studies sociology us_foreign_policy virology world_religions
"""
SUBJECTS: tuple[str, ...] = tuple(_SUBJECTS.split())
"""MMLU's subjects, alphabetically; lm-eval has one task for each."""


@dataclass(frozen=True)
class HubSplit:
    path: str
    """Repository, e.g. "allenai/ai2_arc"."""
    config: str | None
    """Configuration, e.g. "ARC-Easy"; None: the default configuration."""
    split: str


@dataclass(frozen=True)
class TaskData:
    """Source, schema and content hash of one task's documents."""

    name: str
    """The task's name (examples: their own name), and the stem of its file in a data folder."""
    hub: HubSplit
    count: int
    """Number of its documents."""
    content_hash: str
    """`hash_of` its documents."""
    canonical: Callable[[Record], Record]
    """Validates a source record and returns the canonical document; raises DataError naming the field."""
    essence: Callable[[Record], list[Any]] = lambda document: list(document.values())
    """The values of a canonical document that determine its evaluation, equal in every source; gold is last."""
    sort_key: Callable[[Record], str] = lambda _: ""
    """Key of a stable sort that gives every source the same order, where sources order groups differently."""

    def hash_of(self, documents: Iterable[Record]) -> str:
        """Return the SHA-256 over one JSON line per canonical document, in order."""
        digest = hashlib.sha256()
        encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
        for document in documents:
            digest.update(encode(self.essence(document)).encode("ascii") + b"\n")
        return digest.hexdigest()


def _check_ending(text: str) -> str:
    if not re.sub(r"\[.*?\]", "", text).strip():
        raise ValueError("has no text outside of brackets, which lm-eval removes with their content")
    return text


_MaybeEmpty = Annotated[str, Field(max_length=LONGEST_TEXT)]
_Text = Annotated[_MaybeEmpty, Field(pattern=r"\S")]
_FourTexts = Annotated[list[_Text], Field(min_length=4, max_length=4)]
_Four = Annotated[int, Field(ge=0, le=3)]
_Two = Annotated[int, Field(ge=0, le=1)]
_Key = Annotated[_Text, AfterValidator(str.strip)]
"""Surrounding spaces are accepted, as in lm-eval's OpenBookQA."""


class _WinoGrande(Stored):
    sentence: Annotated[_Text, Field(pattern="_")]
    option1: _Text
    option2: _Text
    answer: Literal["1", "2"]


class _Choices(Stored):
    text: Annotated[list[_Text], Field(min_length=3, max_length=5)]
    label: list[_Text]


class _FourChoices(_Choices):
    text: _FourTexts


def _check_labels(document: Any) -> Any:
    labels, key = document.choices.label, document.answerKey
    if len(labels) != len(document.choices.text) or len(set(labels)) < len(labels):
        raise ValueError(f"'choices.label': expected {len(document.choices.text)} labels that differ")
    if key not in labels:
        raise ValueError(f"'answerKey' is {key[:60]!r}; expected one of {', '.join(labels)[:60]}")
    return document


class _Arc(Stored):
    id: _Text = ""
    question: _Text
    choices: _Choices
    answerKey: _Key
    _labels = model_validator(mode="after")(_check_labels)


class _OpenBookQA(Stored):
    question_stem: _Text
    choices: _FourChoices
    answerKey: _Key
    _labels = model_validator(mode="after")(_check_labels)


class _HellaSwag(Stored):
    activity_label: _Text
    ctx_a: _Text
    ctx_b: _MaybeEmpty
    endings: Annotated[list[Annotated[_Text, AfterValidator(_check_ending)]], Field(min_length=4, max_length=4)]
    label: Annotated[
        Literal["0", "1", "2", "3"], BeforeValidator(lambda label: str(label) if type(label) is int else label)
    ]


class _Piqa(Stored):
    goal: _Text
    sol1: _Text
    sol2: _Text
    label: _Two


class _SuperGlueBoolQ(Stored):
    question: _Text
    passage: _Text
    label: _Two


class _OriginalBoolQ(Stored):
    question: _Text
    title: _Text
    passage: _Text
    answer: bool


class _Mmlu(Stored):
    subject: Literal[SUBJECTS]  # type: ignore[valid-type]
    question: _Text
    choices: _FourTexts
    answer: _Four


def _form(form: type[BaseModel]) -> Callable[[Record], Record]:
    return lambda record: validated(record, form, DataError, "the document").model_dump(exclude_unset=True)


def _boolq(record: Record) -> Record:
    """Convert both forms of BoolQ: SuperGLUE's (title in the passage, `label`), the original (`title`, `answer`)."""
    if "label" in record:
        return _form(_SuperGlueBoolQ)(record)
    document = _form(_OriginalBoolQ)(record)
    passage = f"{document['title']} -- {document['passage']}"
    return {"question": document["question"], "passage": passage, "label": int(document["answer"])}


def _choices_essence(stem: str) -> Callable[[Record], list[Any]]:
    def essence(document: Record) -> list[Any]:
        choices = document["choices"]
        # As an index, because not every source has the original labels
        return [document[stem], choices["text"], choices["label"].index(document["answerKey"])]

    return essence


TASKS: dict[str, TaskData] = {
    task.name: task
    for task in (
        TaskData(
            name="winogrande",
            hub=HubSplit("allenai/winogrande", "winogrande_xl", "validation"),
            count=1267,
            content_hash="3ad43ab8705544fde1bb1d9d7782ae08c15f6ed0b043bfeff07176a17346a055",
            canonical=_form(_WinoGrande),
        ),
        TaskData(
            name="arc_easy",
            hub=HubSplit("allenai/ai2_arc", "ARC-Easy", "test"),
            count=2376,
            content_hash="670a0943387721e9e9250c3b159c67db43a772ca0feac16cfdd769fb4405f200",
            canonical=_form(_Arc),
            essence=_choices_essence("question"),
        ),
        TaskData(
            name="arc_challenge",
            hub=HubSplit("allenai/ai2_arc", "ARC-Challenge", "test"),
            count=1172,
            content_hash="0103d1c83a48b6cd394c3f40bcc947fa2708a493af3a88afaaf93c093718736c",
            canonical=_form(_Arc),
            essence=_choices_essence("question"),
        ),
        TaskData(
            name="hellaswag",
            hub=HubSplit("Rowan/hellaswag", None, "validation"),
            count=10042,
            content_hash="a448de128749e631eca788bac4908b548699a30a9763a54200842a242d23b190",
            canonical=_form(_HellaSwag),
        ),
        TaskData(
            name="piqa",
            hub=HubSplit("baber/piqa", None, "validation"),
            count=1838,
            content_hash="dcb30990fbb28ff57436343ee38db0bb210e21c4ddd809737ca934b07f511051",
            canonical=_form(_Piqa),
        ),
        TaskData(
            name="openbookqa",
            hub=HubSplit("allenai/openbookqa", "main", "test"),
            count=500,
            content_hash="4ce43dd16c6c927aebd89b57c1c97230af2aa4c69602d4c6db6cbc6dbad28970",
            canonical=_form(_OpenBookQA),
            essence=_choices_essence("question_stem"),
        ),
        TaskData(
            name="boolq",
            hub=HubSplit("aps/super_glue", "boolq", "validation"),
            count=3270,
            content_hash="ece8f1840315f15658cf3e1bd1697f517557fbcd9c83b36a32dff6a49bec98b7",
            canonical=_boolq,
        ),
        TaskData(
            name="mmlu",
            hub=HubSplit("cais/mmlu", "all", "test"),
            count=14042,
            content_hash="06f9d63afd7a6ad663b62f6cd3edec82bbf473f3ec791eef965a4d39c5e55b68",
            canonical=_form(_Mmlu),
            sort_key=lambda document: str(document["subject"]),
        ),
    )
}


EXAMPLES: dict[str, TaskData] = {
    "mmlu_dev": replace(
        TASKS["mmlu"],
        name="mmlu_dev",
        hub=HubSplit("cais/mmlu", "all", "dev"),
        count=285,
        content_hash="430a5e8118ca3d5832b58e82852c0b5c7ba8c55ff9322be8110794a3ee19fefc",
    ),
    "mmlu_validation": replace(
        TASKS["mmlu"],
        name="mmlu_validation",
        hub=HubSplit("cais/mmlu", "all", "validation"),
        count=1531,
        content_hash="6d84a5d291e59f38372151b6031cd56835be8cb740c343ea42ba2be11c8617df",
    ),
}
"""Further splits: MMLU's few-shot examples, five of each subject, and its validation split."""


def canonical_documents(task: TaskData, records: Iterable[tuple[str, object]], source: str) -> list[Record]:
    """Validate and convert all records of a source, each with its position ("line 3") for messages."""
    documents = []
    for position, record in records:
        try:
            if not isinstance(record, dict):
                raise DataError(f"expected a JSON object, found {type(record).__name__}")
            documents.append(task.canonical(record))
        except DataError as error:
            raise DataError(f"{source}, {position} ({task.name}): {error}") from error
    if not documents:
        raise DataError(f"{source} ({task.name}): expected {task.count} documents, found none")
    return sorted(documents, key=task.sort_key)
