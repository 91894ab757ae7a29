"""Proof by running: what two training programs do, or one on one rank and on several, recorded and compared."""
