"""Many workloads, tuned by any number of processes that share a folder."""
