"""Text generation: chunked prefill, shared prefixes, batches that drop finished rows, greedy decoding and sampling."""
