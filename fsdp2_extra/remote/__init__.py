"""A run's folder at a URL: its files, and the lease that stands for a lock."""
