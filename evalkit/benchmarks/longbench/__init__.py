"""LongBench: long documents in, generated answers out, scored as the benchmark's own code scores them."""
