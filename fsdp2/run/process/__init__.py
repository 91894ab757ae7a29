"""The process of a rank: who it is, its group, seeds and settings, its signals and its end."""
