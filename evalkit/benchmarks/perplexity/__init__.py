"""Perplexity of texts: bits per byte by document and by position in the context window.

texts.py           files of `--text` → documents
plan.py            request → specification of the run
token_bytes.py     a text and its tokens → the bytes of each token
windows.py         a document → windows of tokens, each token scored once
batches.py         documents → batches of windows
computing.py       batches → rows of a loaded model
rows.py            log-probabilities of a window → its rows in the journal
results.py         rows → tables and results.json
positions.py       tables → bits per byte by position, with standard errors
results_report.py  finished runs → a `Report` of one run, or of several methods of context extension
figure.py          finished runs → the picture of bits per byte by position
benchmark.py       the benchmark
"""

PERPLEXITY = "perplexity"
"""Name of the benchmark and of its suite."""
