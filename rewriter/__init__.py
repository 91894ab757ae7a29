"""Reads FSDP1 code: `check` lists every use of it, `rewrite` moves what can be moved with certainty to FSDP2."""
