"""One workload under one candidate, live in a worker process, timed on demand.

What measuring, comparing and tuning have in common: the worker's handler, and taking samples.
"""
