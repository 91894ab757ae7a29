"""Is this cluster fit to train? Each rank measures, rank 0 judges, and a finding names the rank, host or pair."""
