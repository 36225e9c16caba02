"""The paper's tables, and a user's own: from a layout file and numbers to LaTeX, Markdown, CSV, HTML or a terminal.

    layout (configs/tables/) ──┐
    numbers (results/published/ │ runs) ── fill ── marks ── a `Table` ── one writer for each format

Nothing here imports torch, transformers or pandas: a table is printed at once.
"""
