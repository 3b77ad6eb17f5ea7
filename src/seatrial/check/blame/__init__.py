"""Localising faults from measurements, and simulated clusters to test it on."""
