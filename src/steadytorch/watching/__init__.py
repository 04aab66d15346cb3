"""Watching: times the steps of the user's own scripts, loops and trainers while they run."""
