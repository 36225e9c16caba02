"""RULER and the needle test: retrieval from long texts, by length and depth.

Each document has two scores from one prefill: that of the generated answer, and the log-likelihood of the gold answer,
in bits per byte and against the answers of other documents. The second tells models apart that generate nothing right.
"""
