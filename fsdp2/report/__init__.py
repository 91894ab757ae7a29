"""What a run says of itself: its header, its events on the console, in metrics.jsonl and in TensorBoard."""
