"""The request layer: what is asked of a model, how it is batched, and the rows that answer it.

    requests of a task ─ planner ─ batches ─ computer ─ rows of the journal

In: the `TaskRequests` of a run. Out: rows, one type for scored sequences and one for generated texts. A kind of
benchmark decides what the tokens of a request are; order, batches, resumption and estimates are the same for all.
"""
