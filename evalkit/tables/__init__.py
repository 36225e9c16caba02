"""The paper's tables, and users' own: from a layout file and numbers to LaTeX, Markdown, CSV, HTML or a terminal.

    layout (configs/tables/) ──┐
    numbers (results/published/ │ runs) ── fill ── marks ── a `Table` ── one writer for each format

No module here imports torch, transformers or pandas at start, so a table prints without delay.
"""
