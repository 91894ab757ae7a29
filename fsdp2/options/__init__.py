"""Options: declared, read from a command line or a file, checked, and refused."""
