"""Estimates of the time left while workers compute."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pytest

from evalkit.benchmarks.run import planned
from evalkit.studies.cluster.driver import ClusterRunner
from evalkit.studies.cluster.resources import ClusterOptions
from evalkit.studies.running import Job
from tests.benchmarks.longbench.made import record, write
from tests.documents import made_up
from tests.engines.cluster.conftest import Nodes, Recorder, states
from tests.tiny import tiny_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


class Watcher(Recorder):
    """Keeps the estimate after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float, float | None]] = []
        """(time, finished share, estimated seconds left)."""

    def advance(self, work: float, documents: int) -> None:
        """Keep what the user would read now."""
        super().advance(work, documents)
        if documents:
            self.seen.append((time.monotonic(), self.share(), self.seconds_left()))


def test_benchmarks_of_different_cost(two_nodes: Nodes, tmp_path: Path) -> None:
    """An answer of a hundred tokens takes longer than a question with two choices; there are more of the latter."""
    tiny_checkpoint(tmp_path / "model", window=1024, layers=6, hidden=512, heads=8)
    made_up(tmp_path / "documents", count=60)
    texts = [" ".join(f"word{n}" for n in range(start, start + 100)) for start in range(0, 1600, 100)]
    write(tmp_path / "rows" / "qasper.jsonl", [record("qasper", n, context=text) for n, text in enumerate(texts)])
    common = {"output": tmp_path / "runs", "device": "cpu", "dtype": "float32", "token_budget": 600}
    choices = {"data_dir": tmp_path / "documents", "allow_unofficial_data": True, "tasks": ("piqa",)}
    answers = {"suite": "longbench", "data_dir": tmp_path / "rows", "context": "none", "tasks": "qasper"}
    answers |= {"max_prompt_tokens": 400}
    jobs = [
        Job(name, planned(tmp_path / "model", common | about, lambda _: None))
        for name, about in (("choices", choices), ("answers", answers))
    ]
    watcher = Watcher()
    assert states(ClusterRunner(ClusterOptions(address=two_nodes.address))(jobs, watcher)) == ["finished"] * 2
    first, last = watcher.seen[0][0], watcher.seen[-1][0]
    moments = [((when - first) / (last - first), share, left, last - when) for when, share, left in watcher.seen]
    print(*(" ".join(f"{number or 0:6.2f}" for number in moment) for moment in moments), sep="\n")
    between = [moment for moment in moments if 0.1 < moment[0] < 0.8]
    assert len(between) > 5
    ratios = [(left or 0.0) / real for _, _, left, real in between]
    assert 0.5 < median(ratios) < 2
    assert min(ratios) > 0.3 and max(ratios) < 3
    assert median(abs(share - elapsed) for elapsed, share, _, _ in between) < 0.15
