"""What one node measures of itself, and the verdicts on it."""
