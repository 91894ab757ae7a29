"""Where a run's memory went: reads what `fsdp2.recording` has written."""
