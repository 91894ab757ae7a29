"""Text and conversations: prepared before a run, and shown as a run sees them."""
