"""Ranks of one job agree on a plan, through the job's own store."""
