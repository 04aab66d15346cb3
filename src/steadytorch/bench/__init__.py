"""Times a workload with a candidate's transforms in a worker process.

`measure`, `compare` and `tune` share the worker handler and the sampling code of this package.
"""
