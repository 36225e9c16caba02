"""A prepared needle test, to a finished run folder.

    needles.parquet            a row for each length, depth and repeat: secret, answer, whether it was found
    heatmap.png, heatmap.pdf   how often, by depth and length
    results.json               the same as numbers

Each batch is in the journal before the next one starts; a resumed run generates what is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from evalkit.benchmarks.needle.request import MAX_NEW_TOKENS, NEEDLE, PreparedNeedle
from evalkit.benchmarks.needle.text import is_found
from evalkit.errors import RunError
from evalkit.progress import Progress
from evalkit.runs.folder import Run
from evalkit.runs.journal import Entry
from evalkit.runs.place import Place
from evalkit.runs.writing import RunWriter, finished_run

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.generation.batches import Prompt
    from evalkit.generation.greedy import Generation
    from evalkit.models.load import LoadedModel

NEEDLES = "needles.parquet"
PICTURES = ("heatmap.png", "heatmap.pdf")


class Answer(NamedTuple):
    """What the journal keeps of a cell."""

    number: int
    """Of the cell, in the order of lengths, depths and repeats."""
    tokens_sha256: str
    """Of the prompt's token ids, as 64-bit integers."""
    tokens: int
    """Of the prompt."""
    reused: int
    """Tokens of it whose keys and values were another prompt's."""
    answer: str
    """Generated text, special tokens apart; ends where the secret is complete."""
    new_tokens: int
    ended: str
    """"end" token, "enough" read, or "length"."""
    seconds: float


def run_needle(prepared: PreparedNeedle, progress: Progress) -> Run:
    """Generate what is missing of a prepared run, write its results and open it."""
    return finished_run(
        prepared.folder,
        prepared.manifest,
        lambda run: all((run.folder / name).is_file() for name in (NEEDLES, *PICTURES)),
        lambda writer: _Session(prepared, writer, progress).complete(),
        progress.say,
        prepared.request.common.device,
    )


def load_needles(run: Run) -> pd.DataFrame:
    """The table of a finished needle test.

    Raises:
        RunError: it is no needle test, not finished, or its table is damaged.
    """
    if run.manifest["rule"] != NEEDLE:
        raise RunError(f"{run.folder} is not a needle test")
    return run.table(NEEDLES, ("length", "depth", "repeat", "secret", "answer", "found"))


class _Session:
    """The part of a run that one process does."""

    def __init__(self, prepared: PreparedNeedle, writer: RunWriter, progress: Progress) -> None:
        self._prepared = prepared
        self._writer = writer
        self._progress = progress
        self._done: dict[int, Answer] = {}
        for entry in writer.entries(Answer):
            self._keep([Answer(*row) for row in entry.rows])

    def complete(self) -> None:
        """Generate what is missing and write every result file."""
        if not all(number in self._done for number in range(len(self._prepared.cells))):
            self._generate()
        self._write_results()

    def _keep(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._done.setdefault(answer.number, answer)

    def _generate(self) -> None:
        from evalkit.benchmarks.multiple_choice.evaluation import load_model
        from evalkit.generation.runner import Runner

        common = self._prepared.request.common
        specification = self._prepared.manifest["specification"]
        loaded = load_model(self._prepared.checkpoint, common, specification, self._progress)
        runner = Runner(loaded, self._writer, common.token_budget, bool(self._done), self._progress)
        plan = runner.plan(self._prompts(loaded), lambda prompt: prompt.index in self._done)
        runner.run({NEEDLE: plan}, lambda _, batch, found: self._finish(batch, found, loaded.tokenizer, runner.place))

    def _prompts(self, loaded: LoadedModel) -> list[Prompt]:
        from evalkit.generation.batches import Prompt
        from evalkit.generation.tokens import as_message, end_tokens

        tokenizer, chat = loaded.tokenizer, self._prepared.request.chat
        size = cache(lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids))
        ends = end_tokens(loaded.model, tokenizer)

        def encode(text: str) -> list[int]:
            return as_message(tokenizer, text) if chat else list(tokenizer(text, verbose=False).input_ids)

        prompts = []
        for number, cell in enumerate(self._prepared.cells):
            tokens = self._prepared.haystack.prompt(cell, encode, size, cue=not chat)

            def enough(ids: list[int], cell: Any = cell) -> bool:
                # A digit may still follow
                return is_found(cell, str(tokenizer.decode(ids[:-1], skip_special_tokens=True)))

            prompts.append(Prompt(number, tokens, MAX_NEW_TOKENS, ends, enough=enough))
        return prompts

    def _finish(self, batch: Sequence[Prompt], found: Sequence[Generation], tokenizer: Any, place: Place) -> None:
        """Put a batch into the journal."""
        answers = [
            Answer(
                number=prompt.index,
                tokens_sha256=hashlib.sha256(prompt.tokens.astype("<i8").tobytes()).hexdigest(),
                tokens=len(prompt.tokens),
                reused=generation.reused,
                answer=tokenizer.decode(generation.tokens, skip_special_tokens=True),
                new_tokens=len(generation.tokens),
                ended=generation.ended,
                seconds=round(generation.seconds, 4),
            )
            for prompt, generation in zip(batch, found, strict=True)
        ]
        seconds = round(sum(answer.seconds for answer in answers), 4)
        # A cell is asked once, so its number names the batch in every session
        self._writer.append(Entry(NEEDLE, batch[0].index, seconds, [list(answer) for answer in answers], place))
        self._keep(answers)

    def _write_results(self) -> None:
        from evalkit.benchmarks.longbench.plots import needle_heatmap

        table = self._table()
        self._writer.save_table(NEEDLES, table)
        found = table.pivot_table(index="depth", columns="length", values="found", aggfunc="mean")
        depths, lengths = [float(depth) for depth in found.index], [int(length) for length in found.columns]
        for name in PICTURES:
            needle_heatmap(found.to_numpy(float), depths, lengths, self._writer.folder / name)
        share = float(table["found"].mean())
        self._writer.save_results(
            {
                "tasks": [{"task": NEEDLE, "n": len(table), "found": int(table["found"].sum())}],
                "averages": [{"name": "needles found", "accuracy": share, "stderr": None}],
                "depths": depths,
                "lengths": lengths,
                "repeats": self._prepared.request.repeats,
                "found": found.to_numpy(float).tolist(),
            },
        )

    def _table(self) -> pd.DataFrame:
        """A row for each cell."""
        import pandas as pd

        rows = []
        for number, cell in enumerate(self._prepared.cells):
            answer = self._done[number]
            about = {"length": cell.length, "depth": cell.depth, "repeat": cell.repeat, "secret": cell.secret}
            rows.append(about | answer._asdict() | {"found": is_found(cell, answer.answer)})
        return pd.DataFrame(rows).drop(columns="number")
