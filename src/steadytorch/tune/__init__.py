"""Searches for the fastest candidate; each candidate runs in its own worker process."""
