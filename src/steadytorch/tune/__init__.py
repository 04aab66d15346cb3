"""Search, verification and choice. Each candidate runs in its own worker process."""
