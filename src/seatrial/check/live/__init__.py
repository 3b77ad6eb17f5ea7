"""A check that measures real hosts: agents, pairs, groups."""
