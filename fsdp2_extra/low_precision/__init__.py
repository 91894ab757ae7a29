"""Parts of torchao: products in float8, and optimizer states of 8 bits."""
