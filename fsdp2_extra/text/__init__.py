"""Text and conversations of one's own: read, tokenised, cut into sequences, and kept prepared."""
