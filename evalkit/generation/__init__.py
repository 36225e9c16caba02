"""Greedy generation for many long prompts: chunked prefill, shared prefixes, batches without wasted rows."""
