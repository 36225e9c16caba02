"""A name that another release removed ends in a one-line error that says what to install."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from evalkit.compatibility import names
from evalkit.errors import EvalkitError

PIP = f"pip install transformers=={names.KNOWN['transformers']}"


@pytest.fixture(autouse=True)
def _another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "version", lambda _: "99.1")


def test_what_is_there() -> None:
    assert names.attribute("transformers", SimpleNamespace(_here=3), "_here") == 3
    assert names.module("transformers", "json").__name__ == "json"
    assert names.call("transformers", lambda one, *, two: one + two, 1, two=2) == 3


def test_a_missing_attribute() -> None:
    with pytest.raises(EvalkitError, match=rf"^transformers 99\.1 has no SimpleNamespace\._gone, .*it works.*{PIP}$"):
        names.attribute("transformers", SimpleNamespace(), "_gone")


def test_a_missing_module() -> None:
    with pytest.raises(EvalkitError, match=rf"^transformers 99\.1 has no module json\._gone, .*{PIP}$"):
        names.module("transformers", "json._gone")


def test_a_module_that_lacks_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_another.py").write_text("import no_such_library", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        names.module("transformers", "needs_another")


def test_other_parameters() -> None:
    def changed(config: object) -> None: ...

    with pytest.raises(EvalkitError, match=r"has .*changed with other parameters \(.*too many.*\), .*pip install"):
        names.call("transformers", changed, 1, 2)


def test_an_error_of_the_function_itself_passes() -> None:
    def refusing(value: int) -> None:
        raise TypeError("not that")

    with pytest.raises(TypeError, match="not that"):
        names.call("transformers", refusing, 1)


def test_the_versions_are_those_that_tests_run_with() -> None:
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    assert all(f"{package}=={version}\n" in lines for package, version in names.KNOWN.items())
