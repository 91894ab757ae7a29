"""Other ways to start `fsdp2.train`."""
