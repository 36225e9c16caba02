"""The one generator: chunked prefill, shared prefixes, batches without wasted rows, tokens chosen greedily or not."""
