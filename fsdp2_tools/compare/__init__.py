"""Strategies and flags side by side, on one model, measured on this machine."""
