"""The run folder: its specification, journal, score table and results, and what they say without a model.

One process writes a folder, each file atomically; every file that is read back is bound to the run by a digest. Rules,
outcomes and traits are pure functions of what is stored.
"""
