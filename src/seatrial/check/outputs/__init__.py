"""Readers and judges of what tools print, one tool a module."""
