"""Import of lm-eval's logs: sample files of another program's evaluation → finished run folders, marked as imported."""
