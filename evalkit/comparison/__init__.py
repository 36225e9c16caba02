"""`evalkit compare`: is B better than A, on the same documents?

    sides.py         what was named on the command line → `Side`s: a name and its runs
    pairing.py       two sides → scores of the same documents, side by side; refuses what cannot be paired
    comparison.py    paired scores → a `Comparison`: every difference with its error, tests, verdicts
    claim.py         what two sides are to each other, and so what a difference between them says
    steps.py         the training step that a run's checkpoint tells
    curves.py        checkpoints of a training → accuracy against step
    decision.py      comparisons → an exit code for continuous integration
    view.py          comparisons and curves → tables
    writers.py       tables → terminal, Markdown, LaTeX, CSV
    plots.py         comparisons and curves → pictures; the only module that imports matplotlib

Reads run folders only: neither torch nor transformers is imported.
"""
