"""The documents of runs over tasks. In: a request. Out: the `Library` of its sources, one for all runs of a study."""

from __future__ import annotations

from evalkit.benchmarks.base import Say
from evalkit.benchmarks.remembered import remembered
from evalkit.benchmarks.suite_request import SuiteRequest
from evalkit.data import Library


def shared_library(request: SuiteRequest, say: Say) -> Library:
    """Return the library with a request's documents; within `remembering` each document is read once.

    Raises:
        DataError: `data_dir` is not a folder that can be read.
    """
    data_dir, unofficial = request.data_dir, request.allow_unofficial_data
    return remembered("library", (data_dir, unofficial), lambda: Library(data_dir, unofficial, say))
