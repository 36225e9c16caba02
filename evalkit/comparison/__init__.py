"""`evalkit compare`: whether B is better than A on the same documents.

    sides.py               run and group names → `Side`s: a name and its runs
    pairing.py             two sides → paired scores of the same documents
    line.py                paired scores of a task or layer → difference, standard error, p value
    comparison.py          a pairing → a `Comparison`: differences, tests, verdicts
    differences.py         the records of a comparison
    claim.py               two sides → the claim that a difference between them supports
    steps.py               a run → the training step of its checkpoint
    curves.py              checkpoints of a training → accuracy by step
    decision.py            comparisons → an exit code for continuous integration
    comparison_report.py   comparisons → tables and records
    curve_report.py        curves → tables and records
    units.py               a measure → number formats
    plots.py               comparisons and curves → figures

Reads run folders only; imports neither torch nor transformers.
"""
