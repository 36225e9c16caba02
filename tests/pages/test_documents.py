"""Documents of a page beside the rules' own decisions and the score tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import evalkit
from evalkit.benchmarks.registry import benchmark
from evalkit.data.sampling import DocumentSample
from evalkit.display import Progress
from evalkit.errors import RunError
from evalkit.models.loading.locate import silent
from evalkit.pages.documents import ABSENT, document_data
from evalkit.runs.accuracies import available_rules
from evalkit.runs.folder import Run, load_run
from evalkit.runs.rules import decide, find_rule, row_scores
from evalkit.runs.score_table import SEGMENTS
from tests.comparison.made import finished_run
from tests.pages.test_blocks import decoded
from tests.sealed import specification, write_run


def data_of(runs: list[Run], **options: Any) -> tuple[Any, dict[str, Any]]:
    """The index, and task → (header, arrays)."""
    found = document_data(runs, [f"run {number}" for number in range(len(runs))], silent, **options)
    return found.index, {one["task"]: decoded(found.blocks[one["block"]]) for one in found.index["tasks"]}


def test_decisions_and_scores_are_the_rules_own(two_runs: list[Run]) -> None:
    """Every rule, document and run."""
    index, blocks = data_of(two_runs)
    for one in index["tasks"]:
        _, arrays = blocks[one["task"]]
        for number, run in enumerate(two_runs):
            scores = run.scores[run.scores["task"] == one["task"]].reset_index(drop=True)
            assert one["rules"] == list(available_rules(run.scores))
            for rule in one["rules"]:
                found = decide(scores, find_rule(rule))
                assert arrays[f"{number}/{rule}/prediction"].tolist() == found["prediction"].tolist()
                assert arrays[f"{number}/{rule}/tie"].astype(bool).tolist() == found["tie"].tolist()
                expected = margins(scores, row_scores(scores, find_rule(rule)))
                np.testing.assert_allclose(arrays[f"{number}/{rule}/margin"], expected, rtol=2**-23)
                assert (np.sign(arrays[f"{number}/{rule}/margin"]) == np.sign(expected)).all()
            names = [f"ll_{segment}" for segment in SEGMENTS]
            np.testing.assert_array_equal(arrays[f"{number}/ll"], scores[names].to_numpy(np.float32).ravel())
            counts = scores[[f"n_{segment}" for segment in SEGMENTS]].to_numpy().ravel()
            assert arrays[f"{number}/n"].tolist() == counts.tolist()


def margins(scores: Any, values: np.ndarray) -> list[float]:
    """Score of the gold choice less the best other, by hand."""
    found = []
    for _, rows in scores.groupby(["subtask", "doc_id"], sort=False):
        gold = int(rows["gold"].iloc[0])
        others = [values[row] for row, choice in zip(rows.index, rows["choice"], strict=True) if choice != gold]
        [own] = [values[row] for row, choice in zip(rows.index, rows["choice"], strict=True) if choice == gold]
        found.append(own - max(others))
    return found


def test_runs_with_other_limits_share_their_documents(tmp_path: Path) -> None:
    """The union, in the order of the first run that has each."""
    short, whole = finished_run(tmp_path, "org/short", first=7), finished_run(tmp_path, "org/whole")
    index, blocks = data_of([short, whole])
    for one in index["tasks"]:
        _, arrays = blocks[one["task"]]
        scores = whole.scores[whole.scores["task"] == one["task"]]
        assert one["documents"] == one["of"] == (scores["choice"] == 0).sum()
        missing = arrays["0/ppl/prediction"] == ABSENT
        assert missing.sum() == one["documents"] - 7
        assert np.isnan(arrays["0/ppl/margin"][missing]).all()
        assert not (arrays["1/ppl/prediction"] == ABSENT).any()
        expected = decide(scores.reset_index(drop=True), find_rule("ppl"))
        places = {
            (s, d): p for s, d, p in zip(expected["subtask"], expected["doc_id"], expected["prediction"], strict=True)
        }
        header = blocks[one["task"]][0]
        names = zip((one["subtasks"][number] for number in arrays["subtask"]), header["ids"], strict=True)
        assert [places[name] for name in names] == arrays["1/ppl/prediction"].tolist()


def test_other_documents_of_a_task_are_apart(tmp_path: Path) -> None:
    first, second = finished_run(tmp_path, "org/first"), finished_run(tmp_path, "org/second")
    assert len(second.scores)  # read before the manifest is changed
    second.manifest["specification"]["documents"]["boolq"] = "other"
    index, _ = data_of([first, second])
    tasks = {one["task"]: one["runs"] for one in index["tasks"]}
    assert tasks["arc_easy"] == [0, 1]
    assert tasks["boolq"] == [0]
    assert tasks["boolq (run 1)"] == [1]


def test_runs_that_disagree_on_a_gold_answer(tmp_path: Path) -> None:
    first, second = finished_run(tmp_path, "org/first"), finished_run(tmp_path, "org/second")
    rows = (second.scores["task"] == "boolq") & (second.scores["doc_id"] == 3)
    second.scores.loc[rows, "gold"] = 1 - second.scores.loc[rows, "gold"]
    with pytest.raises(RunError, match=r"second.*another gold answer of boolq document 3 than run .*first"):
        data_of([first, second])


def needles(root: Path, text: str, secrets: list[str]) -> Run:
    """A finished needle test of two cases, both answered with the first secret."""
    about = specification(f"org/{text}", suite="needle", text=text)
    manifest = {"kind": "needle", "specification": about, "rule": "needle", "groups": {}, "group_sizes": {},
                "documents": {"needle": {"official": None, "source": text, "count": 2}}, "template": {"name": "plain"},
                "model": f"org/{text}"}  # fmt: skip
    found = {"depths": [50.0], "lengths": [100, 200], "repeats": 1, "found": [[1.0, 0.0]]}
    results = {"tasks": [{"task": "needle", "n": 2, "found": 1}], "averages": []} | found
    facts = {"depth": 50, "repeat": 0, "ended": "end", "tokens": 90, "new_tokens": 5, "seconds": 0.5}
    table = pd.DataFrame(
        {"length": [100, 200], "secret": secrets, "answer": secrets[0], "found": [True, False]} | facts
    )
    return load_run(write_run(root, manifest, results, {"needles.parquet": table}))


def test_needles_in_other_texts_are_apart(tmp_path: Path) -> None:
    """Each answer is beside the secret of its own text."""
    runs = [needles(tmp_path, "essays", ["11", "12"]), needles(tmp_path, "laws", ["21", "22"])]
    index, blocks = data_of(runs)
    assert [one["runs"] for one in index["tasks"]] == [[0], [1]]
    for one, secrets in zip(index["tasks"], (["11", "12"], ["21", "22"]), strict=True):
        header, _ = blocks[one["task"]]
        assert header["references"] == [[secret] for secret in secrets]
        [run] = header["runs"].values()
        assert run["answers"] == [secrets[0]] * 2


def test_a_sample_of_the_documents(two_runs: list[Run]) -> None:
    index, blocks = data_of(two_runs, sample=DocumentSample(5))
    whole, all_blocks = data_of(two_runs)
    for one, full in zip(index["tasks"], whole["tasks"], strict=True):
        (header, arrays), (every, entire) = blocks[one["task"]], all_blocks[one["task"]]
        assert (one["documents"], one["of"]) == (5, full["documents"])
        names = [one["subtasks"][s] for s in arrays["subtask"]]
        everyone = list(zip((full["subtasks"][s] for s in entire["subtask"]), every["ids"], strict=True))
        places = [everyone.index(name) for name in zip(names, header["ids"], strict=True)]
        assert arrays["1/acc/prediction"].tolist() == entire["1/acc/prediction"][places].tolist()
        assert arrays["choices"].tolist() == entire["choices"][places].tolist()


@pytest.fixture(scope="module")
def real_runs(checkpoint: Path, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A tiny model on real documents under two templates."""
    return [
        evalkit.evaluate(
            checkpoint,
            tasks=("winogrande", "boolq", "mmlu"),
            template=template,
            data_dir=documents,
            allow_unofficial_data=True,
            device="cpu",
            output=tmp_path_factory.mktemp("runs"),
            progress=Progress(live=False),
        )
        for template in ("inst", "plain")
    ]


def test_prompts_are_those_of_the_views(real_runs: list[Run]) -> None:
    """A prompt for each template; joined, the text that was scored."""
    index, blocks = data_of(real_runs)
    assert {one["task"] for one in index["tasks"]} == {"winogrande", "boolq", "mmlu"}
    for one in index["tasks"]:
        header, arrays = blocks[one["task"]]
        assert [prompt["runs"] for prompt in header["prompts"]] == [[0], [1]]
        for prompt, run in zip(header["prompts"], real_runs, strict=True):
            [view] = benchmark(run.kind).views(run, (one["task"],), silent)
            for place, subtask in enumerate(arrays["subtask"]):
                text = view.texts[one["subtasks"][subtask], header["ids"][place]]  # type: ignore[union-attr]
                common = [(SEGMENTS[number], words) for number, words in prompt["common"][place]]
                assert common == [tuple(piece) for piece in text.common]
                for pieces, expected in zip(prompt["choices"][place], text.choices, strict=True):
                    assert [(SEGMENTS[number], words) for number, words in pieces] == [tuple(p) for p in expected]
                # Options that no continuation shows are given
                shown = header["options"][place] or [
                    "".join(words for number, words in pieces if SEGMENTS[number] == "continuation").strip()
                    for pieces in prompt["choices"][place]
                ]
                assert shown == [option.strip() for option in text.options]
