"""The losses that demo.sh left in a folder, in columns. Exit status 1 if they aren't what they should be."""

import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
fsdp1, fsdp2, resumed = (json.loads((folder / f"{name}.json").read_text()) for name in ("fsdp1", "fsdp2", "resumed"))
start = len(fsdp1) - len(resumed)

print(f"{'step':>4}  {'FSDP1, 2 ranks':>20}  {'FSDP2, 2 ranks':>20}  {'FSDP2, resumed on 3':>20}")
for step, (before, after) in enumerate(zip(fsdp1, fsdp2, strict=True), 1):
    third = f"{resumed[step - 1 - start]!r:>20}" if step > start else ""
    print(f"{step:>4}  {before!r:>20}  {after!r:>20}  {third}".rstrip())

# Three numbers are summed in another order than two: rounding. The first resumed step has that alone; what it makes of
# the parameters grows with Adadelta's steps, and how far depends on the machine (1e-6 and 3e-5 were seen).
apart = [abs(a - b) / abs(a) for a, b in zip(fsdp1[start:], resumed, strict=True)]
equal = fsdp1 == fsdp2
print(f"rewritten script: {'bit-equal' if equal else 'DIFFERENT'} in {len(fsdp1)} steps")
print(f"converted checkpoint on 3 ranks: within {apart[0]:.1e} in the first step, {max(apart):.1e} in {len(apart)}")
sys.exit(not (equal and apart[0] < 1e-6 and max(apart) < 1e-3))
