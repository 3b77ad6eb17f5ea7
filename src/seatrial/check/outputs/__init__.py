"""Readers and judges of tool outputs, one tool per module."""
