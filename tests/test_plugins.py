"""Extensions by other packages, and errors of broken packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evalkit.benchmarks.registry import results_of
from evalkit.cli import main
from evalkit.errors import UnknownNameError, UsageError
from evalkit.exchange.exports import export_run
from evalkit.runs.accuracies import available_rules
from evalkit.runs.continuous import OUTCOMES, ContinuousOutcome, all_outcomes, find_outcome, outcome_of
from evalkit.runs.folder import Run
from evalkit.runs.rules import RULES, Rule, all_rules, choose, find_rule
from evalkit.runs.scales import FRACTION, Scale
from tests.packages import install

Add = Callable[[str, str, str], None]
SHORTEST = Rule("shortest", "the shortest answer", "-characters, highest", lambda t: -t["chars"].to_numpy(float), ())
NOTHING = Rule("nothing", "no number", "", lambda t: np.full(len(t), np.nan), ())
RAISES = Rule("raises", "reads a column that is not there", "", lambda t: t["ll_foo"].to_numpy(), ())
NO_SEGMENT = Rule("no_segment", "needs a segment that does not exist", "", lambda t: t["chars"].to_numpy(), ("foo",))
PROBABILITY = ContinuousOutcome(
    "probability",
    Scale("probability of the gold answer", FRACTION),
    "probability of the gold answer among the choices",
    "p(g)",
    lambda documents: np.exp(documents.log_probabilities[documents.gold]),
    documents="choices",
    beside=True,
)
HALF = replace(PROBABILITY, name="half", values=lambda documents: np.full(len(documents.starts) // 2, 0.5))
UNKNOWN = replace(PROBABILITY, name="unknown", columns=("ll_unconditional",))
BROKEN = replace(PROBABILITY, name="broken", values=lambda documents: documents.of_gold("no_column"))
TOO_FEW = Rule("too_few", "a number too few", "", lambda t: np.zeros(len(t) - 1), ())


def clear_caches() -> None:
    for entries in (find_rule, find_outcome):
        entries.cache_clear()


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Install a package that adds an object of a module to a group."""
    monkeypatch.syspath_prepend(str(tmp_path))
    clear_caches()
    yield lambda group, name, what: install(tmp_path, f"package-{name}", {group: {name: what}})
    clear_caches()


def test_a_rule_of_another_package_applies_to_a_finished_run(finished: Run, add: Add) -> None:
    add("evalkit.rules", "shortest", "tests.test_plugins:SHORTEST")
    assert [rule.name for rule in all_rules()] == [*RULES, "shortest"]
    table = finished.scores
    firsts = [int(part["chars"].to_numpy().argmin()) for _, part in table.groupby(["subtask", "doc_id"], sort=False)]
    assert list(choose(table, find_rule("shortest")).prediction) == firsts
    assert finished.results("shortest").rule == "shortest"
    for rule in (NOTHING, TOO_FEW):  # not a number for each row
        with pytest.raises(UsageError, match=rule.name):
            choose(table, rule)


def test_a_broken_package_is_named_where_it_is_used_and_left_out_of_lists(finished: Run, add: Add) -> None:
    add("evalkit.rules", "absent", "no_such_module:rule")
    add("evalkit.rules", "frame", "pandas:DataFrame")
    assert [rule.name for rule in all_rules()] == [*RULES]
    for name in ("absent", "frame"):
        with pytest.raises(UsageError, match=f"'{name}'"):
            find_rule(name)
    for name, what in {"gone": "no_such_module:files", "raises": "builtins:divmod", "text": "builtins:str"}.items():
        add("evalkit.exports", name, what)
        with pytest.raises(UsageError, match=name):
            export_run(finished, name)
    with pytest.raises(UnknownNameError, match=r"'gon'.*'gone'"):
        export_run(finished, "gon")


@pytest.mark.parametrize("name", ["raises", "no_segment", "nothing"])
def test_a_faulty_rule_affects_no_other(name: str, finished: Run, add: Add, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever does not ask for it gets every other rule, with a note that names it."""
    add("evalkit.rules", name, f"tests.test_plugins:{name.upper()}")
    assert available_rules(finished.scores) == [rule for rule in RULES if rule not in ("pmi", "olmes", "olmo_core")]
    for more, code in (([], 0), (["--rule", name], 2)):
        with pytest.raises(SystemExit) as left:
            main(["rescore", str(finished.folder), *more])
        said = capsys.readouterr()
        assert int(left.value.code or 0) == code and name in (said.err if code else said.out)


def test_an_outcome_of_another_package_applies_to_a_finished_run(
    finished: Run, add: Add, capsys: pytest.CaptureFixture[str]
) -> None:
    add("evalkit.outcomes", "probability", "tests.test_plugins:PROBABILITY")
    assert [outcome.name for outcome in all_outcomes()] == [*OUTCOMES, "probability"]
    expected = [
        float(np.exp(part["ll_continuation"] - np.logaddexp.reduce(part["ll_continuation"])).iloc[part["gold"].iloc[0]])
        for _, part in finished.scores.groupby(["task", "subtask", "doc_id"], sort=False)
    ]
    comparable = results_of(finished).comparable()
    assert comparable.by_rule("probability") == pytest.approx(np.array(expected))
    assert comparable.measure("probability").is_share
    for command in (["ls", "outcomes"], ["rescore", str(finished.folder), "--rule", "probability"]):
        with pytest.raises(SystemExit) as left:
            main(command)
        assert not left.value.code and "probability of the gold answer" in capsys.readouterr().out


def test_a_name_of_evalkit_is_evalkits_own(add: Add) -> None:
    """An outcome of another package replaces neither an outcome nor a rule."""
    for name in ("brier", "acc"):
        add("evalkit.outcomes", name, "tests.test_plugins:PROBABILITY")
    brier = outcome_of("brier")
    assert brier is not None and brier[0] is OUTCOMES["brier"] and outcome_of("acc") is None


@pytest.mark.parametrize("name", ["half", "unknown", "broken", "frame"])
def test_a_faulty_outcome_affects_no_other(
    name: str, finished: Run, add: Add, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an error where it is asked for; in a table of all outcomes, a note names it."""
    add("evalkit.outcomes", name, "pandas:DataFrame" if name == "frame" else f"tests.test_plugins:{name.upper()}")
    for more, code in ((["--rule", name], 2), (["--detail"], 0)):
        with pytest.raises(SystemExit) as left:
            main(["rescore", str(finished.folder), *more])
        said = capsys.readouterr()
        assert int(left.value.code or 0) == code and name in (said.err if code else said.out)
        assert code or "Brier score" in said.out
