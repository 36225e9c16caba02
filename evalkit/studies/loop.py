"""Evaluation in a training loop, by all of its processes.

In: a live model and a step, on all ranks at the same time. Out: every n steps an ordinary run folder of the model,
named by step, a line in a CSV file, and metrics for the loop's logger. The main process plans and writes the run; all
compute its batches. Each forward pass of a sharded model needs all processes: those without a pass of their own run one
token. The training itself is not changed: see `models/module_state.py`.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

import torch
import transformers
from torch import distributed

from evalkit.benchmarks.keywords import SuiteSettings
from evalkit.benchmarks.registry import benchmark, results_of
from evalkit.benchmarks.request import SuiteRequest
from evalkit.benchmarks.run import given_options, planned
from evalkit.benchmarks.session import OpenRun, Prepared, finished, load_checked, opened, prefetched
from evalkit.display import Progress
from evalkit.errors import EvalkitError, RunError, UsageError, first_line, reading_as
from evalkit.inputs import values
from evalkit.inputs.settings import fitted, settings_of, with_settings
from evalkit.models.called import CalledModel
from evalkit.models.live import LiveSpec, live_model
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import ModelSpec
from evalkit.models.module_state import state_digest
from evalkit.paths import replace_file, temporary_folder
from evalkit.requests.batches import Batch, Budget
from evalkit.runs.finding import folder_name, list_runs
from evalkit.runs.folder import Run, specification_id

_PILOT = 8
"""Documents of each task in the timing of a budget."""
_DOCUMENTS = ("limit", "sample", "seed")
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def logged_metrics(run: Run, rule: str) -> dict[str, float]:
    """Return the metrics of a finished run, named `evalkit/<suite>/<task>/<metric>`; averages are named as tasks.

    The error of the last average is its metric `stderr`. Values have the metric's unit (accuracies are fractions).
    Numbers that are not finite are left out: a file of logged numbers must be valid JSON.

    Args:
        run: the run.
        rule: of the plan: a finished run may have been started under another one.
    """
    other, results, logged = run.other_rule(rule), results_of(run), dict[str, float | None]()
    metrics = [metric for metric in results.metrics(other) if metric.layer is None]
    logged |= {f"{metric.task}/{metric.name}": metric.value for metric in metrics}
    averages = results.averages(other)
    logged |= {f"{average['name']}/{average['metric']}": average["value"] for average in averages}
    if averages:
        logged[f"{averages[-1]['name']}/stderr"] = averages[-1]["stderr"]
    numbers = {name: float(value) for name, value in logged.items() if value is not None}
    return {f"evalkit/{run.suite}/{name}": value for name, value in numbers.items() if math.isfinite(value)}


class Ranks:
    """All processes of this training, which call the methods at the same time. A single process needs no group."""

    def __init__(self) -> None:
        self._group: Any = None
        self.rank, self.size = 0, 1
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            self._group = distributed.new_group(backend="gloo", timeout=timedelta(days=7))
            self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all(self, value: Result) -> list[Result]:
        """Return the values of all processes, in the order of their ranks."""
        values: list[Any] = [value] * self.size
        if self._group is not None:
            distributed.all_gather_object(values, value, self._group)
        return values

    def any(self, value: bool) -> bool:
        flags = torch.tensor([int(value)], device="cpu")
        if self._group is not None:
            distributed.all_reduce(flags, group=self._group)
        return bool(flags.item())

    def agree(self, work: Callable[[], Result], fill: Callable[[], None] | None = None) -> Result:
        """Return the result of this process's work, if that of all processes succeeds; otherwise raise in all.

        Forward passes of a sharded model within the work are preceded by `any(True)`, and `fill` runs an empty one.
        """
        result: Any = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        while fill is not None and self.any(False):
            try:
                fill()
            except Exception as error:
                failure = failure or error
        why = self.all(None if failure is None else _described(failure))
        if failure is not None:
            raise failure
        if failed := [rank for rank in range(self.size) if why[rank] is not None]:
            raise EvalkitError(f"{why[failed[0]]} (process {failed[0]})")
        return result  # type: ignore[no-any-return]

    def from_main(self, work: Callable[[], Result]) -> Result:
        """Return the result of the main process's work, which is pickled, in all."""
        result: list[Any] = [self.agree(lambda: work() if self.is_main else None)]
        if self._group is not None:
            distributed.broadcast_object_list(result, 0, self._group)
        return result[0]  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None


class InLoop:
    """Evaluate the model of any training loop; weights, optimizer and random numbers stay equal, bit for bit.

        inloop = evalkit.InLoop("zeroshot8", every=1000, sample=100, tokenizer=tokenizer, name="my-run")
        for step in range(1, steps + 1):
            ...
            wandb.log(inloop(model, step), step=step)

    It is called in all processes, where the model is whole (also in DistributedDataParallel) or sharded by
    `fully_shard`; they share the batches. Each evaluation leaves a run folder named "<name> step <step>" and a line in
    a CSV file in `output`, and returns its metrics (`evalkit/<suite>/<task>/<metric>`). The model is one of
    transformers, or a module whose forward takes token ids, [1, length], and returns logits, [1, length, vocabulary].

    Args:
        suite: the suite, see `evalkit.evaluate`.
        tokenizer: the model's tokenizer, of transformers.
        every: evaluate at the steps that it divides; None: at each call.
        budget: share of the training's time, such as "2%", that evaluations may take. The first one times steps and
            evaluations of small samples, and chooses the sample, which later ones keep. Call it at each step then.
        window: longest sequence in tokens, of a module whose config does not give it.
        on_error: what a failed evaluation does: "warn" logs a warning and returns no metrics; "raise" raises.
        settings: further settings of the suite's benchmark, see `evalkit.evaluate`.
        attention: see `evalkit.evaluate`; of transformers' models.
        progress: receives messages and progress; None: lines on standard error.
        **shared: tasks, sample and the other settings of `evalkit.evaluate` that are not about loading a model; `name`
            is that of the training.

    Raises:
        UsageError: an argument is invalid.
    """

    @with_settings(SuiteSettings, SuiteRequest)
    def __init__(
        self,
        suite: str | Path | None = None,
        /,
        *,
        tokenizer: transformers.PreTrainedTokenizerBase,
        every: int | None = None,
        budget: str | None = None,
        window: int | None = None,
        on_error: Literal["warn", "raise"] = "warn",
        settings: Mapping[str, Any] | None = None,
        attention: Literal["auto", "sdpa", "eager"] = "auto",
        progress: Progress | None = None,
        **shared: Unpack[SuiteSettings],
    ) -> None:
        """Take the arguments of the class, and the settings of `evalkit.evaluate`.

        Args:
            {settings}
        """
        self._every = None if every is None else values.whole("every", every, 1)
        if on_error not in ("warn", "raise"):
            raise UsageError(f"on_error is {on_error!r}; it must be 'warn' or 'raise'")
        self._raises = on_error == "raise"
        self._options = given_options(shared | ({} if suite is None else {"suite": suite}), settings or {})
        self._name = values.text("name", self._options.pop("name", "training"))
        self._share = None if budget is None else _share_of(budget)
        if self._share is not None and (every is None or {"sample", "limit"} & self._options.keys()):
            raise UsageError(
                "budget: chooses the sample from the time between evaluations; give every=…, and no sample"
            )
        defaults = {setting.name: setting.default for setting in settings_of(ModelSpec).values()}
        given = fitted(ModelSpec, {"attention": attention})
        self._loading: dict[str, Any] = defaults | given | {"tokenizer": tokenizer}
        self._loading["window"] = None if window is None else values.whole("window", window, 1)
        if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
            raise UsageError(f"tokenizer is a {type(tokenizer).__name__}; expected a tokenizer of transformers")
        self._progress = progress or Progress(live=False)
        self.evaluated: int | None = None
        """The step of the latest evaluation, failed or not."""
        self._ranks: Ranks | None = None
        self._first: tuple[float, int] | None = None
        """When it was called first, in seconds, and the step."""

    def __call__(
        self, model: torch.nn.Module, step: int, *, saved_as: str | Path | None = None, now: bool = False
    ) -> dict[str, float]:
        """Evaluate a model, in all processes, if it is time for it; return its metrics, the same in all.

        Args:
            model: the module that the loop calls: wrapped by DistributedDataParallel, if it is.
            step: updates of the weights so far.
            saved_as: folder to which this state is saved, by which its run is found, too.
            now: evaluate it, whether or not `every` divides the step.

        Raises:
            EvalkitError: the evaluation fails, and `on_error` is "raise".
        """
        self._first = self._first or (time.monotonic(), step)
        if not now and self._every is not None and step % self._every:
            return {}
        self.evaluated = step
        try:
            self._ranks = self._ranks or Ranks()
            return self._evaluate(self._ranks, model, step, None if saved_as is None else Path(saved_as).resolve())
        except Exception as error:  # whatever fails, the training is not to be lost
            if self._raises:
                raise
            if self._ranks is None or self._ranks.is_main:
                message = "the evaluation of step %s failed and is left out; the training goes on: %s"
                unexpected = None if isinstance(error, EvalkitError) else error
                _log.warning(message, f"{step:,}", _described(error), exc_info=unexpected)
            return {}

    def check(self, model: torch.nn.Module) -> None:
        """Plan an evaluation, in all processes, and raise an error for invalid options and missing documents."""
        self._ranks = self._ranks or Ranks()
        with ExitStack() as stack:
            spec = self._spec(stack, self._ranks, model, self._name, None)
            self._ranks.from_main(lambda: planned(spec, self._options, silent) and None)

    def close(self) -> None:
        """Give back what processes need to speak to each other; the next evaluation makes it again."""
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None

    def _evaluate(self, ranks: Ranks, model: Any, step: int, saved_as: Path | None) -> dict[str, float]:
        began = time.monotonic()
        with ExitStack() as stack:
            # At the end of all, when nothing of the evaluation is referenced any more
            stack.callback(torch.cuda.empty_cache)
            stack.enter_context(self._progress)
            spec = self._spec(stack, ranks, model, f"{self._name} step {step}", saved_as)
            if self._share is not None and "sample" not in self._options:
                if (sample := self._sample(ranks, spec, self._share, step, began)) is None:
                    return {}
                self._options["sample"] = sample
            plan, run = self._run(ranks, spec, self._options)

            def metrics() -> dict[str, float]:
                assert run is not None
                logged = logged_metrics(run, plan.manifest["rule"])
                curve = specification_id(_settings(run))
                name = folder_name(self._name, run.suite, run.template, run.manifest["specification"]["dtype"], curve)
                _add_line(run.folder.parent / f"{name}.csv", step, logged)
                return logged

            return ranks.from_main(metrics)

    def _spec(self, stack: ExitStack, ranks: Ranks, model: Any, name: str, saved_as: Path | None) -> LiveSpec:
        """Return the spec of a model, which all processes have identified, until a stack ends."""
        live = live_model(model, name, saved_as=saved_as, before=lambda: ranks.any(True), **self._loading)
        spec = ranks.agree(lambda: stack.enter_context(live))
        if isinstance(spec.module, CalledModel):
            spec = ranks.agree(spec.probed, spec.module.fill)
        # The digest of a single process has nothing to be compared with
        digests = ranks.all(ranks.agree(lambda: state_digest(spec.module))) if ranks.size > 1 else ()
        spec = replace(spec, state=ranks.from_main(lambda: spec.identity(self._progress.say, digests)))
        # Of the main process: in others it may name another device
        config = spec.folder / "config.json"
        content = ranks.from_main(config.read_bytes)
        ranks.agree(lambda: config.write_bytes(content))
        return spec

    def _sample(self, ranks: Ranks, spec: LiveSpec, share: float, step: int, began: float) -> int | None:
        """Return the documents of each task that fit into the budget; None if no step has been timed yet.

        Of a training that goes on, they are those of its earlier evaluations.
        """
        options, (at, first) = self._options, self._first or (began, step)
        say = self._progress.say if ranks.is_main else silent

        def earlier() -> tuple[int | None, int]:
            plan = planned(spec, options, silent)
            runs = [run for run in list_runs(plan.folder.parent)
                    if str(run.manifest["model"]).startswith(f"{self._name} step ")
                    and _settings(run, *_DOCUMENTS) == _settings(plan, *_DOCUMENTS)]  # fmt: skip
            newest = max(runs, key=lambda run: str(run.manifest["created"]), default=None)
            documents = max(about["total"] for about in plan.manifest["documents"].values())
            return None if newest is None else newest.manifest["specification"]["sample"], documents

        known, most = ranks.from_main(earlier)
        if known is not None or step == first:
            if known is None:
                say(f"budget: no step has been timed at step {step:,}, which is not evaluated; call it at each step")
            return known
        interval, fixed = ranks.from_main(
            lambda: ((began - at) / (step - first) * (self._every or 1), time.monotonic() - began)
        )
        allowed, count = interval * share, _PILOT

        def timed() -> float:
            """Return the seconds of an evaluation for each document; of larger samples they are at most as many."""
            started = time.monotonic()
            with ExitStack() as stack:
                folder = ranks.from_main(lambda: stack.enter_context(temporary_folder()))
                self._run(ranks, spec, options | {"sample": count, "output": folder})
            return ranks.from_main(lambda: (time.monotonic() - started) / count)

        timed()  # once more than needed: kernels are compiled, documents read
        each = timed()
        while 2 * count <= (fitting := min(most, int((allowed - fixed) / each))):
            count = min(4 * count, fitting // 2 + 1)
            each = timed()
        sample = max(1, min(most, int((allowed - fixed) / each)))
        seconds = fixed + max(sample, _PILOT) * each
        advice = f", more than the budget; evaluate less often than every {self._every:,} steps" * (seconds > allowed)
        say(
            f"budget: {allowed:,.1f} s of {interval:,.1f} s between evaluations; a sample of {sample:,} documents of "
            f"each task takes about {seconds:,.1f} s{advice}"
        )
        return sample

    def _run(self, ranks: Ranks, spec: LiveSpec, options: Mapping[str, Any]) -> tuple[Any, Run | None]:
        """Compute a run; return its plan and it, in the main process."""
        main, say, called = ranks.is_main, self._progress.say, isinstance(spec.module, CalledModel)
        plan = ranks.agree(lambda: planned(spec, options, say) if main else None)
        run = ranks.agree(lambda: finished(plan, say) if plan is not None else None)
        tokens = min(ranks.all(ranks.agree(spec.module.token_budget if called else int)))
        with ExitStack() as stack:
            opening = opened(plan, say) if plan is not None and run is None else None
            current = ranks.agree(lambda: None if opening is None else stack.enter_context(opening))

            def work() -> Any:
                if plan is None or current is None or not current.is_missing:
                    return None
                kind = benchmark(plan.manifest["kind"])
                budget = current.budget()
                if called and not kind.computation.needs_logits_only(plan):
                    suite = plan.manifest["specification"]["suite"]
                    raise UsageError(f"suite {suite}: needs more than a model's logits; use evalkit run --watch")
                budget = Budget(budget.scored or tokens or None, budget.kept)
                return kind.kind, kind.computation.candidates(plan), budget, plan.manifest["specification"]

            if (missing := ranks.from_main(work)) is not None:
                self._compute(ranks, spec, current, *missing)
            return plan, ranks.agree(lambda: run if current is None else current.finish())

    def _compute(
        self, ranks: Ranks, spec: LiveSpec, current: OpenRun | None, name: str, candidates: Any, budget: Budget,
        specification: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Compute the missing batches of a run, one at a time in each process; the main process has the run open."""
        computation = benchmark(name).computation
        progress = self._progress
        fill = spec.module.fill if isinstance(spec.module, CalledModel) else None
        stack, say = ExitStack(), progress.say if ranks.is_main else silent

        def prepare() -> tuple[Any, Any]:
            loaded = load_checked(spec, spec.locate(), specification, say)
            return computation.computer(candidates, loaded, budget, say), loaded.tokenizer

        computer, tokenizer = ranks.agree(prepare, fill)

        def begin() -> Iterator[Batch]:
            if current is None:
                return iter(())
            facts = current.start(Prepared(computer.facts, computer.about, computer.place(), tokenizer))
            remaining = current.batches(facts, tokenizer)
            progress.start(remaining.total, remaining.done)
            stack.enter_context(closing(remaining.batches))
            # In other processes, what is not pickled is made where it is used
            warm = Batch.warm if ranks.size == 1 else lambda batch: None
            ready = prefetched(remaining.batches, warm, remaining.stop)
            stack.enter_context(closing(ready))
            return ready

        def compute(batch: Batch) -> tuple[Any, float, Any]:
            started = time.perf_counter()
            rows = computer.compute(batch)
            return rows, time.perf_counter() - started, computer.place(batch)

        def store(group: list[Batch], results: list[Any]) -> None:
            for batch, (rows, seconds, device) in zip(group, results, strict=False):
                assert current is not None
                current.store(batch, rows, seconds, device)
                progress.task(batch.task)
                progress.advance(batch.work, batch.documents)
                current.report(progress.share(), progress.seconds_left())

        with stack:
            batches = ranks.agree(begin)
            while group := ranks.from_main(lambda: list(islice(batches, ranks.size))):
                batch = group[ranks.rank] if ranks.rank < len(group) else None
                results = ranks.all(ranks.agree(lambda: compute(batch) if batch else None, fill))  # noqa: B023
                ranks.agree(lambda: store(group, results) if ranks.is_main else None)  # noqa: B023


def _settings(run: Any, *without: str) -> dict[str, Any]:
    """Return what all runs of a curve have in common, of a run or a plan."""
    specification = run.manifest["specification"]
    return {name: value for name, value in specification.items() if name not in ("checkpoint", *without)}


def _share_of(budget: str) -> float:
    with suppress(ValueError, AttributeError):
        if budget.endswith("%") and 0 < (percent := float(budget[:-1])) <= 100:
            return percent / 100
    raise UsageError(f"budget is {budget!r}; expected a share of the training's time, such as '2%'")


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, EvalkitError) else f"{type(error).__name__}: {first_line(error)}"


def _add_line(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Write the metrics of a step into a CSV file with a line for each step; those that it had are replaced."""
    lines: dict[int, dict[str, Any]] = {}
    if path.is_file():
        with reading_as(path, "a table of metrics by step", RunError), path.open(newline="", encoding="utf-8") as file:
            lines = {int(line["step"]): line for line in csv.DictReader(file)}
    lines[step] = {"step": step, **metrics}
    text = io.StringIO()
    names = dict.fromkeys(name for line in lines.values() for name in line)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(line for _, line in sorted(lines.items()))
    replace_file(path, text.getvalue().encode())
