"""Runs on the workers of a Ray cluster: `run_on_cluster` in `engine.py`.

engine.py       options → a connected cluster → outcomes
ray_cluster.py  workers as actors of Ray
connection.py   connection to a cluster, or the start of one on this machine
resources.py    the size of a worker, and how many a machine has room for
worker.py       the process of a worker: holds one checkpoint and computes batches
driver.py       the loop: which worker gets which batch, what came back, who is gone
tracked_job.py  a job's state: its folder, its batches and what is known of its speed
planner.py      the thread that opens folders, plans batches and writes results
scheduling.py   the choice of a checkpoint for a free worker
shipping.py     copies of small checkpoints for machines without a shared file system
"""
