"""One workload under one candidate in a worker process, timed on demand.

Measuring, comparing and tuning share this code: the worker's handler and sampling.
"""
