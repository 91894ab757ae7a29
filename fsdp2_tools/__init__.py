"""Tools beside the book, each with a command: they use `fsdp2`, which loads none of them."""
