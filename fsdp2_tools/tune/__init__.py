"""The fastest flags for one model, by short trials on the machine that will train it."""
