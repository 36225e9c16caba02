"""Uses of other libraries' private API: one module for each library, one function for each use.

A private name may change with any release; a function whose name is gone raises an `AttributeError` or `ImportError`.
No other module of evalkit uses a private name of another library.
"""
