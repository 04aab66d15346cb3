"""Verification of training steps against the untouched step."""
