"""Host code compiled by this machine's own C++ compiler.

It is optional: its callers fall back to slower Python code with the same results. A search compiles
it in the background; everything else only loads it.
"""
