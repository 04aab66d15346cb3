"""Workloads: what to run, loading, bundled models, and signatures of inputs."""
