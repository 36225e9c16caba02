"""What evalkit uses of other libraries beyond their public API: one module for each library, one function for each use.

A private name may change with any release. Where one is missing, the function raises an error that says which version
is installed, which one works, and what to do. No other module of evalkit touches a private name of another library.
"""
