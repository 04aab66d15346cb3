"""Verification: checks that a candidate computes the same outputs as the untouched workload."""
