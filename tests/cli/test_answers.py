"""Files of prompts and references, and suites of them: `run` and what reads finished runs of generated answers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from evalkit.benchmarks.answer_metrics import ANSWER_METRICS
from evalkit.benchmarks.prompted import PromptDocument, PromptedBenchmark
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.session import run_plan
from evalkit.display import Progress
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import Run, load_run
from tests.cli.conftest import Command, complains
from tests.longcontext.longbench.made import official_prompt
from tests.tiny import TRAINING_TEXT, tiny_checkpoint

WINDOW = 256
TEXTS = [text for text in TRAINING_TEXT if len(text) > 20]
ASKED = [{"prompt": text[:20], "references": [text[20:], text[:9]]} for text in TEXTS]
LONG = " ".join(TRAINING_TEXT * 4)


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(folder / str(seed), seed=seed, window=WINDOW) for seed in (0, 1)]


def content(outcome: Any) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    parsed: dict[str, Any] = json.loads(outcome.out)
    return parsed


def run_of(outcome: Any) -> Run:
    return load_run(Path(content(outcome)["folder"]))


def test_a_file_is_one_task_named_after_it(evalkit: Command, models: list[Path]) -> None:
    """A suite file with the default settings is the same but for its name."""
    write(Path("asked.jsonl"), ASKED)
    command = ("run", models[0], "--requests", "asked.jsonl", "--format", "json")
    run = run_of(evalkit(*command))
    assert (run.kind, run.suite) == ("answers", "asked") and content(evalkit(*command))["run"] == run.manifest["id"]
    table = run.table("answers.parquet", ())
    assert table["id"].tolist() == [str(number) for number in range(len(TEXTS))]
    assert not table["answer"].str.contains("\n").any()
    match = ANSWER_METRICS["exact_match"].score
    scores = [match(row.answer, json.loads(row.references)) for row in table.itertuples()]
    assert table["score"].tolist() == scores
    Path("own.yaml").write_text("answers: {asked: {requests: asked.jsonl, metric: f1}}", "utf-8")
    suite = run_of(evalkit("run", models[0], "--suite", "own.yaml", "--format", "json"))
    assert suite.table("answers.parquet", ())["text"].tolist() == table["text"].tolist()
    dry = evalkit("run", models[0], "--requests", "asked.jsonl", "--dry-run", "--limit", 3)
    assert dry.code == 0 and "3 documents" in dry.out
    shown = evalkit("run", models[0], "--requests", "asked.jsonl", "--show-prompts", 1)
    assert TEXTS[0][:20] in shown.out and TEXTS[1][:20] not in shown.out


def test_other_content_or_another_setting_is_another_run(evalkit: Command, models: list[Path]) -> None:
    def id_of(lines: Sequence[Any], **settings: Any) -> str:
        write(Path("asked.jsonl"), lines)
        task = {"requests": "asked.jsonl", **settings}
        Path("own.yaml").write_text(yaml.safe_dump({"answers": {"asked": task}}), "utf-8")
        return str(run_of(evalkit("run", models[0], "--suite", "own.yaml", "--format", "json")).manifest["id"])

    asked = ASKED[:3]
    ids = [id_of(asked), id_of(asked[:2]), id_of([*asked[:2], asked[2] | {"references": ["x"]}])]
    ids += [id_of(asked, metric="f1"), id_of(asked, max_new_tokens=4), id_of(asked, until=["e"])]
    ids += [id_of(asked, truncate="middle"), id_of([*asked[:2], asked[2] | {"source": "a"}])]
    assert len(set(ids)) == len(ids)
    with gzip.open("asked.jsonl", "wt", encoding="utf-8") as file:
        file.writelines(f"{json.dumps({'doc_id': n} | line)}\n" for n, line in enumerate(asked))
    again = run_of(evalkit("run", models[0], "--suite", "own.yaml", "--format", "json"))
    # The last settings, with the documents of the first ids: packed, and with their numbers
    assert (
        again.manifest["specification"]["documents"]
        == load_run(next(Path("results/runs").glob(f"*{ids[0]}"))).manifest["specification"]["documents"]
    )


def test_what_is_no_file_of_prompts_is_one_line(evalkit: Command, models: list[Path]) -> None:
    scored = {"doc_id": 0, "context": "a", "continuation": " b"}
    good = ASKED[0]
    cases: dict[str, list[Any]] = {
        "mixed": [good, scored],
        "mixed2": [scored, good],
        "lacks 'references'": [{"prompt": "a"}],
        "'references'": [good | {"references": []}],
        "'prompt'": [good | {"prompt": ""}],
        "document 3": [good | {"doc_id": 3}, good | {"doc_id": 3}],
    }
    for words, lines in cases.items():
        write(Path("asked.jsonl"), lines)
        named = ("asked.jsonl, line", "scored") if words.startswith("mixed") else ("asked.jsonl", words)
        complains(evalkit("run", models[0], "--requests", "asked.jsonl"), 1, *named)
    write(Path("scored.jsonl"), [scored])
    write(Path("asked.jsonl"), [good])
    suites: dict[str, dict[str, Any]] = {
        "scored.jsonl": {"answers": {"own": {"requests": "scored.jsonl"}}},
        "own": {"answers": {"own": {"requests": "asked.jsonl"}}, "groups": {"A": ["other"]}},
        "rule": {"answers": {"own": {"requests": "asked.jsonl"}}, "rule": "acc"},
        "f1": {"answers": {"own": {"requests": "asked.jsonl", "metric": "f"}}},
        "asked.jsonl": {"groups": {"A": ["own"]}, "requests": {"own": "asked.jsonl"}},
        "chat": {"groups": {"A": ["piqa"]}, "chat": True},
    }
    for word, suite in suites.items():
        Path("own.yaml").write_text(yaml.safe_dump(suite), "utf-8")
        outcome = evalkit("run", models[0], "--suite", "own.yaml")
        complains(outcome, 1 if "jsonl" in word else 2, word)
    asked = ("run", models[0], "--requests", "asked.jsonl")
    complains(evalkit(*asked, "--rule", "acc"), 2, "--rule", "asked.jsonl")
    complains(evalkit(*asked, "--tasks", "piqa"), 2, "--requests")
    complains(evalkit(*asked, "--set", "chat=true"), 1, "chat template")
    decide = ("decide", models[0], models[1], "--margin", 1, "--requests", "asked.jsonl")
    complains(evalkit(*decide), 2, "asked.jsonl", "grow")


def test_a_long_prompt_is_an_error_or_loses_its_middle(evalkit: Command, models: list[Path]) -> None:
    """As in LongBench's official code; the cut is counted and shown."""
    write(Path("long.jsonl"), [{"prompt": LONG, "references": "x"}, ASKED[0]])
    complains(evalkit("run", models[0], "--requests", "long.jsonl"), 1, "long document 0", "truncate")
    Path("own.yaml").write_text("answers: {long: {requests: long.jsonl, max_new_tokens: 8, truncate: middle}}", "utf-8")
    run = run_of(evalkit("run", models[0], "--suite", "own.yaml", "--format", "json"))
    long, short = run.table("answers.parquet", ()).to_dict("records")
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    whole = len(tokenizer(LONG, verbose=False).input_ids)
    assert (long["tokens_before"], long["truncated"], short["truncated"]) == (whole, True, False)
    assert long["tokens"] <= WINDOW - 8 and long["prompt"] == LONG
    lengths = {len(official_prompt(tokenizer, LONG, limit)) for limit in range(WINDOW - 16, WINDOW - 7)}
    assert long["tokens"] in lengths
    printed = evalkit("run", models[0], "--suite", "own.yaml")
    assert "long: 1 of 2 prompts" in printed.out and run.stored["tasks"][0]["truncated"] == 1
    shown = content(evalkit("show", run.folder, "--format", "json"))
    assert f"{whole - long['tokens']:,} tokens of the prompt's middle" in json.dumps(shown)
    assert "cut from" in evalkit("run", models[0], "--suite", "own.yaml", "--show-prompts", 2).out


def test_chat_is_a_setting_and_a_key(evalkit: Command, models: list[Path], tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "chat", window=WINDOW)
    config = json.loads((model / "tokenizer_config.json").read_text("utf-8"))
    template = "{% for m in messages %}<s>[{{ m.role }}] {{ m.content }}{% endfor %} [answer]"
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}), "utf-8")
    write(Path("asked.jsonl"), ASKED[:3])
    suite = {"answers": {"asked": {"requests": "asked.jsonl"}}, "chat": True}
    Path("own.yaml").write_text(yaml.safe_dump(suite), "utf-8")
    key = run_of(evalkit("run", model, "--suite", "own.yaml", "--format", "json"))
    setting = run_of(evalkit("run", model, "--requests", "asked.jsonl", "--set", "chat=true", "--format", "json"))
    plain = run_of(evalkit("run", model, "--requests", "asked.jsonl", "--format", "json"))
    texts = [run.table("answers.parquet", ())["text"].tolist() for run in (key, setting, plain)]
    assert texts[0] == texts[1] and key.template == setting.template == "chat" != plain.template
    tokens = AutoTokenizer.from_pretrained(model)(f"<s>[user] {TEXTS[0][:20]} [answer]").input_ids
    assert key.table("answers.parquet", ())["tokens"][0] == len(tokens)
    shown = evalkit("run", model, "--suite", "own.yaml", "--show-prompts", 1)
    assert f"[user] {TEXTS[0][:20]} [answer]" in shown.out


@pytest.fixture
def suite() -> Path:
    """Two tasks in two groups; documents of the first share sources in pairs."""
    write(Path("pairs.jsonl"), [line | {"source": str(number // 2)} for number, line in enumerate(ASKED[:12])])
    write(Path("asked.jsonl"), ASKED[:12])
    about = {"metric": "edit_similarity", "max_new_tokens": 8}
    answers = {"pairs": {"requests": "pairs.jsonl", **about}, "asked": {"requests": "asked.jsonl", **about}}
    groups = {"A": ["pairs"], "B": ["asked"]}
    Path("own.yaml").write_text(yaml.safe_dump({"answers": answers, "groups": groups, "labels": {"asked": "Asked"}}))
    return Path("own.yaml")


def test_finished_runs_are_compared_tabulated_and_reported(evalkit: Command, models: list[Path], suite: Path) -> None:
    runs = [run_of(evalkit("run", model, "--suite", suite, "--format", "json")) for model in models]
    [compared] = content(evalkit("compare", *(run.folder for run in runs), "--format", "json"))["comparisons"]
    means = [run.table("answers.parquet", ()).groupby("task")["score"].mean() for run in runs]
    for task in compared["tasks"]:
        assert task["difference"] == pytest.approx(means[1][task["name"]] - means[0][task["name"]])
    pairs, asked = compared["tasks"]
    assert pairs["stderr"] != asked["stderr"] and pairs["difference"] == pytest.approx(asked["difference"])
    alone, clustered = (
        next(task for task in runs[0].stored["tasks"] if task["task"] == name)["stderr"] for name in ("asked", "pairs")
    )
    assert alone != clustered
    assert [average["name"] for average in runs[0].stored["averages"]] == ["A", "B", "Average"]
    layout = {"caption": "x", "suite": "own.yaml", "rows": [{"items": {"a": "One", "b": "Two"}}],
              "columns": [{"items": {"pairs": "Pairs", "A": "A", "Average": "Avg."}}]}  # fmt: skip
    Path("mine.yaml").write_text(yaml.safe_dump(layout), "utf-8")
    Path("runs.yaml").write_text(
        yaml.safe_dump({"rows": {"a": str(runs[0].folder), "b": str(runs[1].folder)}}), "utf-8"
    )
    table = evalkit("table", "mine.yaml", "--source", "runs", "--runs", "runs.yaml")
    assert table.code == 0 and f"{100 * runs[1].stored['averages'][-1]['value']:.1f}" in table.out, table.err
    page = evalkit("report", *(run.folder for run in runs), "--output", "page.html")
    assert page.code == 0 and "Asked" in Path("page.html").read_text("utf-8"), page.err
    for form in ("run", "every_eval_ever"):
        assert evalkit("export", runs[0].folder, "--to", form, "--output", form).code == 0
    part = run_of(evalkit("run", models[0], "--suite", suite, "--tasks", "asked", "--format", "json"))
    assert [average["name"] for average in part.stored["averages"]] == ["B", "Average (1 of 2)"]


def test_samples_keep_the_documents_numbers(evalkit: Command, models: list[Path], suite: Path) -> None:
    whole = run_of(evalkit("run", models[0], "--suite", suite, "--format", "json"))
    part = run_of(evalkit("run", models[0], "--suite", suite, "--sample", 5, "--format", "json"))
    assert part.manifest["specification"]["documents"] == whole.manifest["specification"]["documents"]
    both = [run.table("answers.parquet", ()).set_index(["task", "id"]) for run in (whole, part)]
    assert len(both[1]) == 10
    assert both[0].loc[both[1].index, "prompt"].equals(both[1]["prompt"])


def test_a_study_of_a_suite_file(evalkit: Command, models: list[Path], suite: Path) -> None:
    study = {
        "output": "runs",
        "checkpoints": {"zero": str(models[0]), "one": str(models[1])},
        "benchmarks": {"own": {"suite": str(suite), "sample": 4}},
    }
    Path("study.yaml").write_text(yaml.safe_dump(study), "utf-8")
    outcome = evalkit("study", "run", "study.yaml")
    assert outcome.code == 0 and outcome.out.count("finished") >= 2, outcome.err
    assert evalkit("compare", "--study", "study.yaml").code == 0


def test_a_class_and_a_file_are_the_same(models: list[Path], evalkit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(PromptedBenchmark):
        kind, description = "own", "own questions"
        metric = "f1"

        def tasks(self) -> dict[str, list[PromptDocument]]:
            return {"asked": [PromptDocument(**line) for line in ASKED]}  # type: ignore[arg-type]

    own = Own()
    with monkeypatch.context() as patch:
        for module in ("registry", "session"):
            patch.setattr(f"evalkit.benchmarks.{module}.benchmark", lambda _: own)
        run = run_plan(own.plan(request_of(own.request, models[0], {}), silent), Progress(live=False))
    write(Path("asked.jsonl"), ASKED)
    Path("own.yaml").write_text("answers: {asked: {requests: asked.jsonl, metric: f1}}", "utf-8")
    other = run_of(evalkit("run", models[0], "--suite", "own.yaml", "--output", "other", "--format", "json"))
    columns = ["id", "prompt", "references", "answer", "score"]
    assert run.table("answers.parquet", ())[columns].equals(other.table("answers.parquet", ())[columns])
    assert run.manifest["specification"]["documents"] == other.manifest["specification"]["documents"]
