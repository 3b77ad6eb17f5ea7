"""Findings, their codes, limits, comparisons with peers and a baseline, and the report."""
