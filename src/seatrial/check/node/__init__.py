"""Measurements that one node makes of itself, and their verdicts."""
