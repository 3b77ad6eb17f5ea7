"""What every part of the control plane needs of a node: its start parameters, its ranks' environment, processes that may hang."""
