"""Uses of other libraries' private API: one module for each library, one function for each use.

A private name may change with any release. If one is missing, the function raises an error with the installed version,
the version that works, and what to do. No other module of evalkit uses a private name of another library.
"""
