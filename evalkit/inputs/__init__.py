"""Validated input: JSON, YAML, options and texts from outside. Nothing is converted silently.

An error names the file and the key. `settings.py` is the one definition of what a request's settings are.
"""
