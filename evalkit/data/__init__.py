"""Documents of the eight tasks and their few-shot examples, pinned by content hash.

In: task names and, optionally, the user's files. Out: canonical documents, identical from every source.
Importing this package imports neither pyarrow nor the `datasets` library.
"""

from __future__ import annotations

from evalkit.data.library import DocumentLocation, Documents, Library
from evalkit.data.schema import EXAMPLES, SUBJECTS, TASKS, HubSplit, TaskData

__all__ = ["EXAMPLES", "SUBJECTS", "TASKS", "DocumentLocation", "Documents", "HubSplit", "Library", "TaskData"]
