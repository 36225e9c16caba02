"""Documents of the eight tasks and their few-shot examples, pinned by content.

In: task names and, if the user has them, files. Out: canonical documents, the same from every source.
Importing this package loads neither pyarrow nor the `datasets` library.
"""

from __future__ import annotations

from evalkit.data.library import Documents, Library, Whereabouts
from evalkit.data.schema import EXAMPLES, TASKS, HubSplit, TaskData
from evalkit.data.subjects import subjects

__all__ = ["EXAMPLES", "TASKS", "Documents", "HubSplit", "Library", "TaskData", "Whereabouts", "subjects"]
