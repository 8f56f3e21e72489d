#!/usr/bin/env bash
# Two routers that share their state over Redis, and two pairs of prefill and decode on one Mooncake pool; each pair
# registers with one router. A conversation of four turns alternates between the routers. The script kills the second
# router during a stream, and restarts it later. It exits 0 only if every answer equals the answer without pool and
# cache, each turn from the second on uses cached tokens, both routers list the same four instances, and all processes
# have ended.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started with sh, which may be another shell
set -euo pipefail

# shellcheck source=examples/cache_storage/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

P_PORTS=(52400 52401)
D_PORTS=(52500 52501)
REFERENCE_PORT=52600
ROUTER_PORTS=(52700 52800)
REDIS_PORT=16379

check_redis() {
    command -v redis-server >/dev/null || [ "$DRY_RUN" = yes ] ||
        die "redis-server is not installed: please install it first, on Debian with: sudo apt-get install redis-server"
}

# Redis stores nothing on disk: after its restart, the routers write their state again.
start_redis() {
    say "starting Redis (port $REDIS_PORT)"
    start redis redis-server --bind 127.0.0.1 --port "$REDIS_PORT" --save "" --appendonly no
    wait_for redis "dict://127.0.0.1:$REDIS_PORT/PING" '\+PONG' # curl has no redis://; the line that it sends for dict:// is a valid command
}

# start_router NAME PORT
start_router() {
    say "starting $1 (port $2)"
    start "$1" "${ROUTER_COMMAND[@]}" --port "$2" --splitwise --workers 1 \
        --shared-state "redis://127.0.0.1:$REDIS_PORT/0"
}

# start_pair NUMBER ROUTER_PORT
start_pair() {
    local i=$(($1 - 1))
    start_instance "prefill_$1" $((2 * i)) "${P_PORTS[i]}" --splitwise-role prefill \
        --cache-transfer-protocol "$TRANSFER" --router "0.0.0.0:$2" --kvcache-storage-backend mooncake
    start_instance "decode_$1" $((2 * i + 1)) "${D_PORTS[i]}" --splitwise-role decode \
        --cache-transfer-protocol "$TRANSFER" --router "0.0.0.0:$2" --enable-output-caching \
        --kvcache-storage-backend mooncake
}

# Stops everything. Ends the script with an error if a process still runs afterwards.
check_all_end() {
    local name group deadline=$((SECONDS + STOP_DEADLINE)) groups=("$@" "${pids[@]}")
    [ "$DRY_RUN" = no ] || return 0
    stop_all
    for group in "${groups[@]}"; do
        while kill -0 -- "-$group" 2>/dev/null; do
            [ $SECONDS -lt $deadline ] || die "NOT VERIFIED: processes of group $group still run"
            sleep 0.1
        done
    done
    say "          All ${#groups[@]} started programs have ended, with all their processes."
}

parse_arguments "$@"
[ "${ROUTER:-kvstore}" = kvstore ] ||
    die "ROUTER=$ROUTER cannot share its state with another router; leave ROUTER unset to use ours, which can"
[ "$(id -u)" -eq 0 ] || check_redis # for root, scripts/setup tries to install it
prepare mooncake_master="$MASTER_PORT" "mooncake_master's metadata=$METADATA_PORT" \
    "mooncake_master's metrics=$METRICS_PORT" Redis="$REDIS_PORT" "router 1=${ROUTER_PORTS[0]}" \
    "router 2=${ROUTER_PORTS[1]}" "prefill 1=${P_PORTS[0]}" "prefill 2=${P_PORTS[1]}" "decode 1=${D_PORTS[0]}" \
    "decode 2=${D_PORTS[1]}" reference="$REFERENCE_PORT"
check_redis

say ""
say "=== Two routers with shared state, two pairs, and a pool ==="
start_instance reference 0 "$REFERENCE_PORT" --no-enable-prefix-caching
unset MOONCAKE_CONFIG_PATH # a file would override these variables
export MOONCAKE_MASTER_SERVER_ADDR=127.0.0.1:$MASTER_PORT
export MOONCAKE_METADATA_SERVER=http://127.0.0.1:$METADATA_PORT/metadata
export MOONCAKE_GLOBAL_SEGMENT_SIZE=${MOONCAKE_GLOBAL_SEGMENT_SIZE:-500000000}
start_master
start_redis
EXPENDABLE=router_2
for i in 1 2; do
    start_router "router_$i" "${ROUTER_PORTS[i - 1]}"
    wait_for "router_$i" "http://127.0.0.1:${ROUTER_PORTS[i - 1]}/registered_number"
done
KILLED=${pids[router_2]-PID}
[ "$DRY_RUN" = yes ] || disown "$KILLED" # it will be killed, and bash would print a message
start_dashboard "${ROUTER_PORTS[0]}" "$METRICS_PORT"
for i in 1 2; do
    start_pair "$i" "${ROUTER_PORTS[i - 1]}"
done
wait_for reference "http://127.0.0.1:$REFERENCE_PORT/health"
for i in 1 2; do
    wait_for "prefill_$i" "http://127.0.0.1:${P_PORTS[i - 1]}/health"
    wait_for "decode_$i" "http://127.0.0.1:${D_PORTS[i - 1]}/health"
done
for i in 1 2; do
    wait_for "router_$i" "http://127.0.0.1:${ROUTER_PORTS[i - 1]}/registered_number" '"prefill": *2,.*"decode": *2[,}]'
done

check_turns() {
    watched "$PYTHON" verify_router_ha.py "$1" --routers "${ROUTER_PORTS[@]}" --reference "$REFERENCE_PORT" \
        --instances "${P_PORTS[@]}" "${D_PORTS[@]}" --master-metrics "$METRICS_PORT" --notes log_reference/notes.json \
        --keys-per-block "$KEYS_PER_BLOCK" "${@:2}"
}

check_turns before --kill "$KILLED"
unset "pids[router_2]"
start_router router_2_again "${ROUTER_PORTS[1]}"
wait_for router_2_again "http://127.0.0.1:${ROUTER_PORTS[1]}/health"
check_turns after --log log_router_2_again/nohup

if [ "$KEEP" = yes ]; then
    keep "${ROUTER_PORTS[@]}" "${P_PORTS[@]}" "${D_PORTS[@]}"
else
    check_all_end "$KILLED"
fi
