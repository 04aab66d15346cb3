"""Search and choice. Each candidate runs in its own worker process."""
