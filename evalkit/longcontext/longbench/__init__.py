"""The LongBench benchmark: generated answers to questions on long documents, scored as in its official code."""
