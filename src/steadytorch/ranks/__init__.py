"""Ranks of a distributed job agree on one plan through the job's key-value store."""
