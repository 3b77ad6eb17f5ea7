"""What is found, and what it is compared with: findings, their codes, limits, siblings, a baseline; the report of it."""
