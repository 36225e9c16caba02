"""Studies: many checkpoints and benchmarks in one YAML file (`study_file.py`), run, listed and read back."""
