"""Parts that a flag of the book loads: other libraries, data and strategies. The book works without each of them."""
