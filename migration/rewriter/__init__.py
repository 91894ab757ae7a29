"""Reads FSDP1 code: `check` lists every use of it, `rewrite` moves it to FSDP2.

A program that says all that it does becomes plain FSDP2. One that doesn't keeps FSDP1's interface, on FSDP2: its
imports change, and what they bring decides at run time. So a rule stays small by what it leaves to the interface. One
that serves fewer than two of the programs and repositories that the rewriter was tried on isn't written.
"""
