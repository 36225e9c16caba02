"""Runs on the workers of a Ray cluster: `ClusterRunner` in `engine.py`.

engine.py          options → a connected cluster → outcomes
ray_cluster.py     workers as actors of Ray
connection.py      connection to a cluster, or the start of one on this machine
paths.py       the size of a worker, and how many a machine has room for
worker.py          the process of a worker: holds one checkpoint and computes batches
driver.py          the loop: which worker gets which batch, what came back, who is gone
worker_pool.py     the workers: started, watched, replaced
job_queue.py       the jobs: opened and planned ahead of the workers, and finished
tracked_job.py     a job's state: its folder, its batches and what is known of its speed
estimates.py       costs of jobs, and the time left
planner.py         the thread that opens folders, plans batches and writes results
journal_writer.py  the thread that writes batches to the journals
scheduling.py      the choice of a checkpoint for a free worker
shipping.py        copies of small checkpoints for machines without a shared file system
"""
