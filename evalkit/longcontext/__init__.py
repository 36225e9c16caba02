"""Long contexts: LongBench, RULER and the needle test, and perplexity by position."""
