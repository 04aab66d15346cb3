"""Tunes many workloads with any number of processes that share a folder."""
