"""Outputs that were collected elsewhere: files and folders are read, cut into outputs, and handed to the readers."""
