"""Report on the state of a study: a line for each run, totals, and the time left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evalkit.brief import counted
from evalkit.progress import clock
from evalkit.reporting.decimals import percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.studies.status import STATES, RunState
from evalkit.studies.study import Study

_HEADERS = ("run", "state", "share", "left", "result")
_ESTIMATE = (
    "time left: a running run's own estimate; of others, the time of the finished runs of the same benchmark (the "
    "median), in proportion to the models' parameters, as if computed one after the other on the same hardware"
)


def status_report(study: Study, states: Sequence[RunState]) -> Report:
    """Return the report.

    Args:
        study: the study.
        states: from `states_of`.
    """
    records = [_record(one) for one in states]
    table = simple_table("status", _HEADERS, [_row(one) for one in states], texts=5)
    count = {state: sum(one.state == state for one in states) for state in STATES}
    totals = ", ".join(f"{number} {state}" for state, number in count.items() if number)
    left = [one for one in states if one.state != "finished"]
    known = [one.seconds_left for one in left if one.seconds_left is not None]
    summary = [f"{counted(len(states), 'run')}: {totals}"]
    if known:
        unknown = len(left) - len(known)
        without = f", without {counted(unknown, 'run')} of unknown time" if unknown else ""
        summary.append(f"about {clock(sum(known))} left{without}")
    content = {
        "study": str(study.path),
        "output": str(study.output),
        "totals": count,
        "seconds_left": sum(known) if known else None,
        "runs_of_unknown_time": len(left) - len(known),
        "estimate": _ESTIMATE,
        "runs": records,
    }
    return Report((table,), ("; ".join(summary),), notes=(_ESTIMATE,) if known else (), content=content,
                  records=records)  # fmt: skip


def _row(one: RunState) -> list[str]:
    share = "" if one.share is None or one.state in ("finished", "missing") else f"{percent(one.share, 0)} %"
    left = "" if one.seconds_left is None else clock(one.seconds_left)
    where = f"process {one.process} on {one.host}" if one.state == "running" else ""
    return [one.run.label, one.state, share, left, one.result or one.reason or where]


def _record(one: RunState) -> dict[str, Any]:
    return {
        "run": one.run.label,
        "checkpoint": one.run.checkpoint.name,
        "seed": one.run.checkpoint.seed,
        "step": one.run.checkpoint.step,
        "benchmark": one.run.benchmark.name,
        "id": one.id,
        "folder": None if one.folder is None else str(one.folder),
        "state": one.state,
        "share": one.share,
        "host": one.host,
        "process": one.process,
        "seconds": one.seconds,
        "seconds_left": one.seconds_left,
        "score": one.score,
        "result": one.result,
        "reason": one.reason,
        "parameters": one.parameters,
    }
