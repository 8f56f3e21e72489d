#!/usr/bin/env bash
# A prefill and a decode instance behind the router, with one Mooncake pool. A conversation of three turns goes through
# them. Exits 0 only if prefill loads from the pool the blocks that decode generated in the turn before, and if every
# answer equals the answer of the same model without pool and cache.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started with sh, which may be another shell
set -euo pipefail

# shellcheck source=examples/cache_storage/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

P_PORT=52400
D_PORT=52500
REFERENCE_PORT=52600
ROUTER_PORT=52700

parse_arguments "$@"
prepare mooncake_master="$MASTER_PORT" "mooncake_master's metadata=$METADATA_PORT" \
    "mooncake_master's metrics=$METRICS_PORT" router=$ROUTER_PORT prefill=$P_PORT decode=$D_PORT \
    reference=$REFERENCE_PORT

say ""
say "=== The conversation without pool and cache, for comparison ==="
start_instance reference 0 "$REFERENCE_PORT" --no-enable-prefix-caching
wait_for reference "http://127.0.0.1:$REFERENCE_PORT/health"
watched "$PYTHON" verify.py reference --port "$REFERENCE_PORT" --answers log_reference/answers.json
stop reference

say ""
say "=== The conversation through router, prefill and decode, with a pool ==="
unset MOONCAKE_CONFIG_PATH # a file would override these variables
export MOONCAKE_MASTER_SERVER_ADDR=127.0.0.1:$MASTER_PORT
export MOONCAKE_METADATA_SERVER=http://127.0.0.1:$METADATA_PORT/metadata
export MOONCAKE_GLOBAL_SEGMENT_SIZE=${MOONCAKE_GLOBAL_SEGMENT_SIZE:-1000000000}

start_master
say "starting the router (port $ROUTER_PORT)"
start router "${ROUTER_COMMAND[@]}" --port "$ROUTER_PORT" --splitwise
wait_for router "http://127.0.0.1:$ROUTER_PORT/registered_number"
start_dashboard "$ROUTER_PORT" "$METRICS_PORT"
start_instance prefill 0 "$P_PORT" --splitwise-role prefill --cache-transfer-protocol "$TRANSFER" \
    --router "0.0.0.0:$ROUTER_PORT" --kvcache-storage-backend mooncake
start_instance decode 1 "$D_PORT" --splitwise-role decode --cache-transfer-protocol "$TRANSFER" \
    --router "0.0.0.0:$ROUTER_PORT" --enable-output-caching --kvcache-storage-backend mooncake
wait_for prefill "http://127.0.0.1:$P_PORT/health"
wait_for decode "http://127.0.0.1:$D_PORT/health"
wait_for router "http://127.0.0.1:$ROUTER_PORT/registered_number" '"prefill": *1,.*"decode": *1[,}]'

watched "$PYTHON" verify.py conversation --port "$ROUTER_PORT" --answers log_reference/answers.json \
    --prefill-log log_prefill/api_server.log --instances "$P_PORT" "$D_PORT" --master-metrics "$METRICS_PORT" \
    --keys-per-block "$KEYS_PER_BLOCK"

if [ "$KEEP" = yes ]; then
    keep "$D_PORT" "$ROUTER_PORT" "$P_PORT" "$D_PORT"
fi
