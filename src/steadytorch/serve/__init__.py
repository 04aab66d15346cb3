"""Serves plans: applies them to models, loads them from files and moves them between machines."""
