"""Search and choice; every candidate in a worker process."""
