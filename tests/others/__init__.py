"""Models of others: named, found, started, loaded, trained and resumed."""
