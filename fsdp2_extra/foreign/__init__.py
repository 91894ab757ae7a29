"""Doors for a stranger's file: one for each kind of thing that it might reach for."""
