"""Allocations of a run while it trains: recorded by kind and phase, profiled, and named where memory runs out."""
