"""Optional host-side C++ code, compiled by this machine's own compiler.

Without the compiled code, callers fall back to slower Python code with the same results. A search
compiles the C++ code in the background; other callers only load the compiled module.
"""
