"""Distribute a model: mesh, sharding groups, prefetch, precision, recomputation, and one small engine
for each strategy. Every file takes plain arguments and can be copied out."""
