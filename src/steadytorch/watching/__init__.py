"""Watching the steps of code that runs anyway: scripts, loops and trainers."""
