"""evalkit as an lm-eval model: lm-eval's Hugging Face class with evalkit's tokenisation, scoring and generation.

In: a checkpoint. Out: a `Harness` for `lm_eval.simple_evaluate(model=…)`, with the same tokens, windows and stopping
criteria as lm-eval's own class; prefixes are shared. The request layer computes the answers, as those of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from evalkit.benchmarks.keywords import LoadingSettings
from evalkit.benchmarks.lm_eval.encoding import TaskModelRequests
from evalkit.benchmarks.lm_eval.requests import (
    ROLLING,
    AnswerRow,
    AnswersFromRows,
    ModelRequest,
    answer_in,
    distinct,
    requests_of,
    rows_of,
)
from evalkit.benchmarks.session import prefetched
from evalkit.compatibility.transformers import quiet
from evalkit.display import news
from evalkit.errors import CheckpointError, UsageError
from evalkit.escape import brief
from evalkit.inputs.settings import check_names, settings_of, with_settings
from evalkit.inputs.values import switch, whole
from evalkit.models.loading.load import LoadedModel
from evalkit.models.loading.spec import UNSTRETCHED, ModelSpec, model_spec
from evalkit.requests.batches import Batch, Budget
from evalkit.requests.computer import RequestComputer
from evalkit.requests.planner import planned as plan_requests
from evalkit.requests.requests import Encoder, RunRequests
from evalkit.requests.rows import NothingFinished, key_of
from evalkit.suites.lm_eval_tasks import log_from


@with_settings(LoadingSettings, ModelSpec)
def harness(
    model: str | Path | LoadedModel,
    *,
    token_budget: int | Literal["auto"] | None = None,
    add_bos_token: bool | None = None,
    batch_size: int | Literal["auto"] | None = None,
    say: Callable[[str], None] = news,
    tokenizer: str | Path | None = None,
    **loading: Unpack[LoadingSettings],
) -> Harness:
    """Load a checkpoint as a model for lm-eval.

        lm_eval.simple_evaluate(model=evalkit.harness("demo"), tasks=["lambada_openai"], limit=50)

    Args:
        model: a checkpoint folder, a hub name, a GGUF file, or "demo"; or a loaded model.
        token_budget: most tokens of a scored batch, and of keys and values during generation; None or "auto": as
            many as fit into memory.
        add_bos_token: whether texts begin with the BOS token; None: the tokenizer's default.
        batch_size: most texts generated at once; None or "auto": as many as fit. No answer depends on it.
        say: called with each progress message; by default messages are printed to standard error.
        tokenizer: folder or hub name of another tokenizer.
        {settings}

    Raises:
        EvalkitError: the checkpoint or an argument is not valid; one line that names it.
    """
    return Harness(
        model,
        token_budget=token_budget,
        add_bos_token=add_bos_token,
        batch_size=batch_size,
        say=say,
        tokenizer=tokenizer,
        **loading,
    )


@register_model("evalkit")
class Harness(AnswersFromRows, HFLM):  # type: ignore[misc]
    """lm-eval's `HFLM` with a checkpoint that evalkit loads; see `harness`.

    Args:
        pretrained: a checkpoint as in `--model`, or a loaded model.
        **model: how the checkpoint is loaded; the fields of `ModelSpec`.
    """

    def __init__(
        self,
        pretrained: str | Path | LoadedModel,
        *,
        token_budget: int | str | None = None,
        add_bos_token: bool | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        say: Callable[[str], None] = news,
        **model: Any,
    ) -> None:
        # lm-eval's command line passes strings, and "no" would be truthy
        if add_bos_token is not None:
            switch("add_bos_token", add_bos_token)
        check_names(model, ModelSpec)
        if isinstance(pretrained, LoadedModel):
            loaded = pretrained
            known = settings_of(ModelSpec)
            if given := [key for key, value in model.items() if value not in (None, UNSTRETCHED, known[key].default)]:
                raise UsageError(f"{loaded.name}: the model is already loaded; leave out {given[0]}, or give its path")
        else:
            spec = model_spec(pretrained, **model)
            checkpoint = spec.locate(say)
            spec.extension(checkpoint, say)
            loaded = spec.load(checkpoint, say)
        if loaded.bos_id is None and loaded.eos_id is None:
            raise CheckpointError(
                f"{loaded.name}: its tokenizer has neither a BOS nor an EOS token, and lm-eval needs one as prefix "
                "of a text without context; give another --tokenizer"
            )
        with quiet(), log_from(logging.ERROR):
            super().__init__(loaded.model, tokenizer=loaded.tokenizer, add_bos_token=add_bos_token, batch_size=1)
        self.loaded = loaded
        self._say = say
        automatic = batch_size is None or str(batch_size).startswith("auto")
        most_texts = None if automatic else whole("batch_size", batch_size, 1, ", or auto")
        # lm-eval's attribute, which other code may read
        self.batch_size_per_gpu = most_texts or 1
        given_budget = token_budget not in (None, "auto")
        budget = whole("token_budget", token_budget, 1, ", or auto") if given_budget else None
        # A model that was given may have been modified since loading; results of its start-up check are not stored
        remembers = loaded is not pretrained
        self._computer = RequestComputer(
            replace(loaded, window=self.max_length), Budget(budget, budget), say, remembers, most_texts
        )

    def __repr__(self) -> str:
        return brief(self, *self.loaded.summary)

    def rows(self, instances: list[Any]) -> list[list[AnswerRow]]:
        """Compute lm-eval's requests of one kind; see `AnswersFromRows`."""
        requests = requests_of(instances)
        by_journal: dict[str, list[ModelRequest]] = {}
        for request in distinct(requests):
            by_journal.setdefault(request.journal, []).append(request)
        tasks = [TaskModelRequests(str(each[0].task), each, self.add_bos_token) for each in by_journal.values()]
        rows: dict[Any, AnswerRow] = {}
        with quiet(), log_from(logging.ERROR):
            facts = self._computer.prepare([task.candidates() for task in tasks], is_timed=False)
            encoder = Encoder(self.tokenizer, facts, self._say)
            planned = plan_requests(RunRequests(tasks, budget=self._computer.budget.scored), encoder, NothingFinished())
            for batch in prefetched(planned.batches, Batch.warm, planned.stop):
                for row in self._computer.compute(batch):
                    rows[batch.journal, *key_of(row)] = row
        answers = [rows_of(request, rows) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            if request.kind != ROLLING:  # lm-eval does not cache windows of a longer text
                self.cache_hook.add_partial(request.kind, request.arguments, answer_in(answer[0]))
        return answers

    def get_model_info(self) -> dict[str, Any]:
        """Return lm-eval's description of the model, without `HFLM`'s request to the hub."""
        about = {"model_num_parameters": self.loaded.parameters, "model_dtype": self.loaded.dtype}
        return {**about, "model_revision": "", "model_sha": ""}
