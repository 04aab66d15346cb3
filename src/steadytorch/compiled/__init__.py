"""Compiled code, converted models and compiler choices, stored with a plan for later processes."""
