"""Any lm-eval task, through evalkit's engine and into evalkit's run folders.

benchmark.py       the benchmark: request → plan → batches → results; lm-eval itself computes the metrics
catalogue.py       names → lm-eval's tasks; unsupported tasks are rejected here, before a model is loaded
index.py           lm-eval's index of task files
task_files.py      validation of the task files of `--include-path`
plan.py            request → specification of the run
requests.py        lm-eval's requests, their keys and their rows in the journal
encoding.py        texts → token ids, in batches, identical to lm-eval's
texts.py           generation requests → prompts; generated tokens → answers
batches.py         requests → batches
scoring.py         token ids → log-likelihoods, batch by batch
answering.py       batches → answers of a loaded model
harness.py         lm-eval's Hugging Face model with evalkit's tokenisation, scoring and generation
answers.py         an lm-eval model that returns the answers in the journal
results.py         lm-eval's results → results.json, lm-eval's own files, the score table
results_report.py  results.json → a `Report`
views.py           a finished run → its documents as people read them
samples.py         sample files → texts of choices, answered documents
prompt_text.py     requests → text for a terminal
quiet.py           suppression of lm-eval's log and output
"""
