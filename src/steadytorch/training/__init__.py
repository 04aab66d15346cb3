"""Verifies training steps against the untouched training step."""
