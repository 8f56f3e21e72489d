#!/usr/bin/env bash
# Two instances that share a Mooncake pool with three masters; etcd elects the leader. The script kills the leader while
# an answer is generated. It exits 0 only if every request gets its answer, and if afterwards, through the new leader, one
# instance loads a new prompt that the other computed, and a prompt that was stored before. For the latter, the masters
# write an operation log to etcd (docs/pool_survival.md has its limits).
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started with sh, which may be another shell
set -euo pipefail

# shellcheck source=examples/cache_storage/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# These are the ports of FastDeploy's examples: etcd 12379 and 12380, master i 808i with its metrics at 909i.
ETCD_PORT=12379
ETCD_PEER_PORT=12380
RPC_PORTS=(8081 8082 8083)
METRICS_PORTS=(9091 9092 9093)
PORT_0=52700
PORT_1=52800
CLUSTER_ID=mooncake_cluster

# Sets ETCD. The package is only unpacked, because an installation would start etcd as a system service.
find_etcd() {
    local folder=$ROOT/.cache/etcd
    ETCD=$(command -v etcd || echo "$folder/usr/bin/etcd")
    [ ! -x "$ETCD" ] && [ "$DRY_RUN" = no ] || return 0
    say "downloading etcd (Debian's etcd-server) into $folder"
    mkdir -p "$folder"
    (
        cd "$folder"
        apt-get download -q etcd-server || { [ "$(id -u)" -eq 0 ] && apt-get update -q && apt-get download -q etcd-server; }
        dpkg-deb -x etcd-server_*.deb .
    ) >"$ROOT/.cache/etcd.log" 2>&1 || true
    [ -x "$ETCD" ] || die "etcd is not installed: please install it first, on Debian with: sudo apt-get install etcd-server"
}

start_etcd() {
    say "starting etcd (port $ETCD_PORT)"
    [ "$DRY_RUN" = yes ] || mkdir -p log_etcd
    start etcd "$ETCD" --name kvstore --data-dir log_etcd/data \
        --listen-client-urls "http://127.0.0.1:$ETCD_PORT" --advertise-client-urls "http://127.0.0.1:$ETCD_PORT" \
        --listen-peer-urls "http://127.0.0.1:$ETCD_PEER_PORT" \
        --initial-advertise-peer-urls "http://127.0.0.1:$ETCD_PEER_PORT" \
        --initial-cluster "kvstore=http://127.0.0.1:$ETCD_PEER_PORT"
    wait_for etcd "http://127.0.0.1:$ETCD_PORT/health" true
}

start_masters() {
    local i
    EXPENDABLE=
    for i in 0 1 2; do
        say "starting master $((i + 1)) of 3 (port ${RPC_PORTS[i]})"
        start "master_$((i + 1))" "$ROOT/.venv/bin/mooncake_master" --enable_ha=true --cluster_id="$CLUSTER_ID" \
            --etcd_endpoints="http://127.0.0.1:$ETCD_PORT" --enable_oplog=true \
            --rpc_address=127.0.0.1 --rpc_port="${RPC_PORTS[i]}" \
            --metrics_host=127.0.0.1 --metrics_port="${METRICS_PORTS[i]}"
        EXPENDABLE+=" master_$((i + 1))"
        [ "$DRY_RUN" = yes ] || disown "${pids[master_$((i + 1))]}" # one will be killed, and bash would print a message
    done
    for i in 0 1 2; do
        wait_for "master_$((i + 1))" "http://127.0.0.1:${METRICS_PORTS[i]}/health" '"leader_address":"'
    done
}

parse_arguments "$@"
prepare etcd="$ETCD_PORT" "etcd's peers=$ETCD_PEER_PORT" "master 1=${RPC_PORTS[0]}" "master 2=${RPC_PORTS[1]}" \
    "master 3=${RPC_PORTS[2]}" "master 1's metrics=${METRICS_PORTS[0]}" "master 2's metrics=${METRICS_PORTS[1]}" \
    "master 3's metrics=${METRICS_PORTS[2]}" "instance 0=$PORT_0" "instance 1=$PORT_1"
find_etcd

say ""
say "=== Two instances, one pool, three masters ==="
unset MOONCAKE_CONFIG_PATH # a file would override these variables
export MOONCAKE_MASTER_SERVER_ADDR=etcd://127.0.0.1:$ETCD_PORT
export MOONCAKE_METADATA_SERVER=P2PHANDSHAKE
export MOONCAKE_GLOBAL_SEGMENT_SIZE=${MOONCAKE_GLOBAL_SEGMENT_SIZE:-1000000000}
export MC_STORE_CLUSTER_ID=$CLUSTER_ID

start_etcd
start_masters
start_router_and_dashboard "${METRICS_PORTS[@]}"
start_instance instance_0 0 "$PORT_0" --kvcache-storage-backend mooncake "${REGISTER[@]}"
start_instance instance_1 1 "$PORT_1" --kvcache-storage-backend mooncake "${REGISTER[@]}"
wait_for instance_0 "http://127.0.0.1:$PORT_0/health"
wait_for instance_1 "http://127.0.0.1:$PORT_1/health"

watched "$PYTHON" verify_ha.py --ports "$PORT_0" "$PORT_1" \
    --logs log_instance_0/api_server.log log_instance_1/api_server.log \
    --masters "${METRICS_PORTS[0]}:${pids[master_1]-PID}" "${METRICS_PORTS[1]}:${pids[master_2]-PID}" \
    "${METRICS_PORTS[2]}:${pids[master_3]-PID}" --keys-per-block "$KEYS_PER_BLOCK"

if [ "$KEEP" = yes ]; then
    keep "$PORT_0" "$PORT_1" "$PORT_0" "$PORT_1"
fi
