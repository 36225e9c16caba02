"""Engines: who computes the batches of several runs. `here.py`: this process; `cluster/`: workers on a Ray cluster."""
