"""Any lm-eval task, through evalkit's engine and into evalkit's run folders.

lm-eval builds the requests (`plan.py`, `catalogue.py`) and computes the metrics from the stored answers (`answers.py`,
`results.py`); evalkit computes the answers in batches with shared prefixes (`batches.py`, `answering.py`). `harness.py`
is evalkit as an lm-eval model.
"""
