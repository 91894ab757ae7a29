"""Reads FSDP1 code: `check` lists every use of it, `rewrite` moves what can be moved with certainty to FSDP2.

A rule stays small by what it refuses. One that serves fewer than two of the programs and repositories that the rewriter
was tried on isn't written: such a use gets a mark, which says what to decide.
"""
