"""The control plane: one agent a node, one of them the coordinator, and the ranks below them.

Read `seatrial.record.messages` first: it declares every message that these processes send each other. It is in `record`
because ranks and fork server receive some of them, and `train` never imports `control`.
"""
