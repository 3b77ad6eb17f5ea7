"""A report in its forms."""
