"""Batch after batch through a loaded model, with what the user is told meanwhile.

In: a loaded model, an open run folder, plans of batches. Out: generations, handed over batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evalkit.generation.batches import Prompt, plan_batches
from evalkit.generation.greedy import Generation, Generator
from evalkit.generation.room import Room
from evalkit.progress import Progress
from evalkit.runs.place import place_of
from evalkit.runs.writing import RunWriter


class Runner:
    """Generates for a run.

    Args:
        loaded: a `LoadedModel`.
        writer: of the run, whose manifest gets the model and the budget.
        budget: most tokens of keys and values at a time; None: those that the run was begun with, so that it goes on
            with the same batches, else what half of the free memory holds.
        resumed: whether the run was begun before.
        progress: where news and progress go.
    """

    def __init__(self, loaded: Any, writer: RunWriter, budget: int | None, resumed: bool, progress: Progress) -> None:
        self._generator = Generator(loaded.model)
        self._progress = progress
        stored = writer.manifest.get("token_budget") if resumed else None
        self._room = Room(loaded.model, self._generator, budget or stored)
        self.place = place_of(loaded.device, loaded.attention)
        """Where batches are computed."""
        writer.compute_on(self.place)
        writer.save_manifest(loaded=loaded.facts(), token_budget=self._room.tokens)

    def plan(self, prompts: Sequence[Prompt], done: Callable[[Prompt], bool]) -> list[list[Prompt]]:
        """Batches of all prompts, less those that are done: what an earlier session left are whole batches."""
        planned = plan_batches(prompts, self._room.tokens, self._generator.chunk, self._room.most_rows)
        left = [[prompt for prompt in batch if not done(prompt)] for batch in planned]
        return [batch for batch in left if batch]

    def run(
        self,
        plans: Mapping[str, Sequence[Sequence[Prompt]]],
        keep: Callable[[str, Sequence[Prompt], list[Generation]], None],
    ) -> None:
        """Generate all batches.

        Args:
            plans: name of a task → its batches, at least one in all.
            keep: given each batch when it is done, with its task.
        """
        prompts = [prompt for batches in plans.values() for batch in batches for prompt in batch]
        self._progress.say(self._room.estimate(prompts))
        self._progress.start(sum(map(self._room.work, prompts)), 0.0)
        for task, batches in plans.items():
            self._progress.task(task)
            for batch in batches:
                keep(task, batch, self._generator.generate(batch, self._progress.say))
                self._progress.advance(sum(map(self._room.work, batch)), len(batch))
