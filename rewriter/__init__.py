"""Reads FSDP1 code: `check` lists every use of it, `rewrite` moves what can be moved with certainty to FSDP2.

FSDP1's class is followed under whatever name it has, and so are the models that it makes. Options are followed no
further than the call and the variables beside it: what else they are, `shard_like_fsdp1` asks them at run time.

A rule stays small by what it refuses. One that serves fewer than two of the programs and repositories that the rewriter
was tried on isn't written: such a use gets a mark, which says what to decide.
"""
