"""What to run, and how inputs enter keys."""
