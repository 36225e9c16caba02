"""Kinds of runs. `base.py` is the protocol: a request becomes a plan, batches, rows and results.

`session.py` executes a plan and survives a kill; `registry.py` finds a kind by its name; each kind is a folder here.
What reads finished runs needs no torch; what computes is imported when a run starts.
"""
