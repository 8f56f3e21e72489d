#!/usr/bin/env bash
# Trains the needle model (once), serves it with and without sparse attention, and compares the answers.
# Exits 0 only if the comparison succeeds. PYTHON, OUTPUT, DENSE_PORT and SPARSE_PORT may be set.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started with sh, which may be another shell
set -euo pipefail

HERE=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(CDPATH='' cd "$HERE/../.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
OUTPUT=${OUTPUT:-$ROOT/.cache/retrieval}
DENSE_PORT=${DENSE_PORT:-8101} SPARSE_PORT=${SPARSE_PORT:-8102}
MODEL=$OUTPUT/needle

usage="usage: run.sh    PYTHON, OUTPUT, DENSE_PORT and SPARSE_PORT may be set"
case ${1-} in
    "") ;;
    -h | --help)
        echo "$usage"
        exit
        ;;
    *)
        echo "run.sh: unknown argument '$1'; $usage" >&2
        exit 1
        ;;
esac
# scripts/setup makes .venv; it is not needed if PYTHON names another environment.
[[ $PYTHON != "$ROOT/.venv/bin/python" ]] || "$ROOT/scripts/setup"

processes=()
stop() {
    for pid in "${processes[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait
}
trap stop EXIT
trap 'exit 130' INT

# finish COMMAND...: runs a command and waits for its end. Ctrl-C ends it without Python's traceback.
finish() {
    "$@" &
    processes+=($!)
    wait "$!"
    unset 'processes[-1]' # another process may get its number before this script ends
}

finish "$PYTHON" "$ROOT/examples/cache_storage/check_ports.py" "the dense instance=$DENSE_PORT" \
    "the sparse instance=$SPARSE_PORT"
mkdir -p "$OUTPUT"
# All connections are on this machine and must not use a proxy.
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY

serve() { # name port flags...
    local name=$1 port=$2
    shift 2
    FD_LOG_DIR=$OUTPUT/log-$name "$PYTHON" -m engine.api_server --model "$MODEL" --host 127.0.0.1 --port "$port" \
        --device cpu --block-size 32 --max-model-len 8448 --num-gpu-blocks-override 1200 --max-num-seqs 4 "$@" \
        >"$OUTPUT/$name.out" 2>&1 &
    processes+=($!)
    for _ in $(seq 240); do
        kill -0 "${processes[-1]}" 2>/dev/null || break # before curl: another server may respond on this port
        if curl -qsf "http://127.0.0.1:$port/health" >/dev/null; then return; fi
        sleep 0.5
    done
    echo "run.sh: the $name instance did not start; its log is $OUTPUT/$name.out" >&2
    exit 1
}

[[ -f $MODEL/tokenizer.json ]] || finish "$PYTHON" "$HERE/train_needle.py" --output "$MODEL"
cd "$ROOT"
serve dense "$DENSE_PORT"
serve sparse "$SPARSE_PORT" --enable-retrieval --retrieval-init-tokens 128 --retrieval-local-tokens 256 \
    --retrieval-topk-percent 0.2 --retrieval-dense-boundary 1K --retrieval-offload-boundary 2K
finish "$PYTHON" "$HERE/compare.py" --dense "http://127.0.0.1:$DENSE_PORT" --sparse "http://127.0.0.1:$SPARSE_PORT"
