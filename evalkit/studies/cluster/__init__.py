"""Runs on the workers of a Ray cluster: `driver.ClusterRunner`."""
