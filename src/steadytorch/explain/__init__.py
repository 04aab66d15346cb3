"""Explain where time and variability go: traces, the ledger of each step, findings by rule."""
