"""Measurements of a cluster, by `seatrial check` and by earlier runs, that replace what the catalogue and the calibration say."""
