"""Results from and for other programs: logs of lm-eval as runs, and finished runs in the formats of other tools."""
