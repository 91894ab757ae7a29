#!/bin/bash
# The same training on several nodes by hand: give the same command on each of them.
#
#   NNODES=2 HOST=node0 launchers/torchrun.sh --run-dir /shared/runs/a --model llama --model-size 1b
#
# HOST is one of the nodes, and the others reach its PORT. torchrun gives the ranks their numbers, unless NODE_RANK=0 on
# HOST, 1 on the next, … does. NNODES=1:4 goes on when a node is lost (docs/elastic.md).
# Where a node's own name has no address, or another network's: LOCAL_ADDR=10.0.0.2 is the node's address, HOST that of one
# of them, and INTERFACE=eth1 the network device.
set -euo pipefail
: "${NNODES:=1}" "${HOST:=localhost}" "${PORT:=29500}" "${RUN_ID:=fsdp2}" "${RANKS_PER_NODE:=gpu}"

fail() {
  echo "torchrun.sh: error: $1" >&2
  exit 2
}

if [[ $NNODES != 1 && $HOST == localhost ]]; then
  fail "NNODES=$NNODES without HOST: give the name or address of one node, the same on each of them"
fi
if [[ -n ${INTERFACE:-} ]]; then
  [[ -e /sys/class/net/$INTERFACE ]] || fail "INTERFACE=$INTERFACE: this node has $(ls -m /sys/class/net)"
  export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi

# After SIGTERM torchrun gives its ranks 30 s by default to finish a step and save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

options=(--nnodes "$NNODES" --nproc_per_node "$RANKS_PER_NODE")
conf=()
if [[ -n ${NODE_RANK:-} ]]; then
  [[ $NNODES != *:* ]] || fail "NNODES=$NNODES with NODE_RANK: nodes that come and go have no fixed numbers; drop NODE_RANK"
  options+=(--node-rank "$NODE_RANK" --master-addr "$HOST" --master-port "$PORT")
else
  if [[ -n ${LOCAL_ADDR:-} ]]; then
    options+=(--local-addr "$LOCAL_ADDR")
    # torchrun would compare HOST with what the node's own name resolves to.
    [[ $LOCAL_ADDR == "$HOST" ]] && conf+=(is_host=1) || conf+=(is_host=0)
  fi
  [[ $HOST != *:* ]] || HOST="[$HOST]" # IPv6
  options+=(--rdzv-backend c10d --rdzv-endpoint "$HOST:$PORT" --rdzv-id "$RUN_ID")
fi
if [[ $NNODES == *:* ]]; then
  # Why each of these: docs/elastic.md.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  options+=(--max-restarts 3)
  conf+=(keep_alive_interval=1 keep_alive_max_attempt=3 last_call_timeout=2)
fi
exec torchrun "${options[@]}" --rdzv-conf "$(IFS=,; echo "${conf[*]}")" -m fsdp2.train "$@"
