"""Any lm-eval task, through evalkit's engine and into evalkit's run folders.

harness.py       lm-eval's Hugging Face model with evalkit's tokenisation and scoring
encoding.py      texts → token ids, in batches, exactly lm-eval's
scoring.py       token ids → log-likelihoods, batch by batch
catalogue.py     names → lm-eval's tasks; what cannot be served is refused here, before a model is loaded
preparation.py   what was asked → what the run is
session.py       a prepared run → a finished run folder; lm-eval itself computes the metrics
answers.py       an lm-eval model that answers from the journal, and scores what it does not hold
results.py       lm-eval's results → results.json, its own files, the score table
view.py          what a person reads on a terminal
"""
