"""The paper's tables, and users' own: a layout and numbers, published or of runs, make a `Table` for every format.

No module here imports torch, transformers or pandas at start, so a table prints without delay.
"""
