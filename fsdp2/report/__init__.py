"""A run's reports: its header, its events on the console, in metrics.jsonl and in trackers."""
