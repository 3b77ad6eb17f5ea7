"""Output formats of a report."""
