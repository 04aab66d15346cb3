"""Verification: whether a candidate computes the outputs of the untouched workload."""
