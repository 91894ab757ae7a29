"""A run directory: what lies where, its one writer, and the room that it needs on the disk and in memory."""
