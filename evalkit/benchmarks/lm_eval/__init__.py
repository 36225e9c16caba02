"""Any lm-eval task, through evalkit's engine and into evalkit's run folders.

lm-eval loads the tasks (`tasks.py`), builds the requests (`plan.py`) and evaluates the stored answers (`results.py`);
evalkit computes the answers in batches with shared prefixes (`batches.py`, `harness.py`). `Harness` is evalkit as an
lm-eval model.
"""
