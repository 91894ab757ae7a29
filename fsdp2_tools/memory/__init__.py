"""Recorded memory, read and drawn."""
