#!/usr/bin/env bash
# Two standalone instances that share one Mooncake pool: the second loads the blocks that the first computed. Exits 0
# only if the second loads whole prompts of 2,000 tokens from the pool and gives the same answers as the first. If the
# model needs more than 0.5 s to compute such a prompt, the second's first token must also come at least 5 times sooner.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started with sh, which may be another shell
set -euo pipefail

# shellcheck source=examples/cache_storage/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PORT_0=52700
PORT_1=52800

parse_arguments "$@"
prepare mooncake_master="$MASTER_PORT" "mooncake_master's metadata=$METADATA_PORT" \
    "mooncake_master's metrics=$METRICS_PORT" "instance 0=$PORT_0" "instance 1=$PORT_1"

say ""
say "=== Two instances, one pool ==="
export MOONCAKE_CONFIG_PATH=$HERE/mooncake_config.json

start_master
start_router_and_dashboard "$METRICS_PORT"
start_instance instance_0 0 "$PORT_0" --kvcache-storage-backend mooncake "${REGISTER[@]}"
start_instance instance_1 1 "$PORT_1" --kvcache-storage-backend mooncake "${REGISTER[@]}"
wait_for instance_0 "http://127.0.0.1:$PORT_0/health"
wait_for instance_1 "http://127.0.0.1:$PORT_1/health"

watched "$PYTHON" verify.py sharing --ports "$PORT_0" "$PORT_1" --master-metrics "$METRICS_PORT" \
    --keys-per-block "$KEYS_PER_BLOCK" \
    --logs log_instance_0/api_server.log log_instance_1/api_server.log

if [ "$KEEP" = yes ]; then
    keep "$PORT_0" "$PORT_1" "$PORT_0" "$PORT_1"
fi
