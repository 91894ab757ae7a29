#!/usr/bin/env bash
# From FSDP1 to FSDP2 with a script and a checkpoint:  docs/migration/demo.sh [FOLDER]
# Options of the script can be given in ARGS, such as ARGS="--steps 40 --data-root data".
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-runs/migrate-demo}
rm -rf "$out"
mkdir -p "$out"
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore  # FSDP1 announces at each call that it is deprecated
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}
# Without dropout, whose masks depend on the number of ranks.
options=(--no-dropout --save-at 10 ${ARGS:-})

run cp "$here/fsdp1_mnist.py" "$out/before.py"
run torchrun --standalone --nproc_per_node 2 "$out/before.py" "${options[@]}" \
    --checkpoint "$out/checkpoint" --losses "$out/fsdp1.json"

run cp "$out/before.py" "$out/after.py"
run python -m fsdp2.migrate rewrite --write "$out/after.py"
run python -m fsdp2.migrate check "$out/after.py"
run torchrun --standalone --nproc_per_node 2 "$out/after.py" "${options[@]}" \
    --checkpoint "$out/checkpoint-fsdp2" --losses "$out/fsdp2.json"

run python -m fsdp2.migrate checkpoint "$out/checkpoint" "$out/converted"
run torchrun --standalone --nproc_per_node 3 "$out/after.py" "${options[@]}" \
    --resume "$out/converted" --losses "$out/resumed.json"

run python "$here/side_by_side.py" "$out"
