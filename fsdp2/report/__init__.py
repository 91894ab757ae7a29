"""A run's reports: its header, its events on the console, in metrics.jsonl and in trackers."""

PLAN = "plan.json"  # in a run's directory, where `python -m fsdp2.plan … --run-dir RUN` leaves it
