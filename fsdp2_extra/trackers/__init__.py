"""Metrics to trackers: which ones there are, and a listener for each."""
