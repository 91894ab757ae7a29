"""Bad input, made by hypothesis: it ends in something valid or in one line, and in nothing else.

In the suite each test has a few hundred examples, always the same. `make fuzz` runs all files of this folder again and
again with other ones. A new file here needs no wiring: it takes `trials` and `one_line` from `common.py`.
"""
