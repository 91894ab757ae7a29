"""What is allocated while a run trains: recorded by kind and phase, profiled, and named where memory runs out."""
