"""Any lm-eval task, through evalkit's engine and into evalkit's run folders.

lm-eval loads the tasks (`catalogue.py`), builds the requests (`plan.py`) and evaluates the stored answers
(`results.py`); evalkit computes the answers in batches with shared prefixes (`batches.py`, `answering.py`).
`harness.py` is evalkit as an lm-eval model.
"""
