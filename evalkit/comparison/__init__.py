"""`evalkit compare`: whether B is better than A on the same documents.

Reads run folders only; imports neither torch nor transformers.
"""
