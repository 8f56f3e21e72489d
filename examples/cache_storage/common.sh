# Functions of run.sh, run_pd_storage.sh, run_ha.sh and run_router_ha.sh, which source this file.
# shellcheck shell=bash disable=SC2034  # these scripts use variables that are unused here

HERE=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(CDPATH='' cd "$HERE/../.." && pwd)
# KVSTORE_PYTHON may name a Python with all packages, for a machine where scripts/setup cannot download them.
PYTHON=${KVSTORE_PYTHON:-$ROOT/.venv/bin/python}
SMALL_MODEL=$ROOT/.cache/models/kvstore-tiny-qwen2
FASTDEPLOY_PAGE=https://paddlepaddle.github.io/FastDeploy/get_started/installation/nvidia_gpu/
FASTDEPLOY_INDEX=https://www.paddlepaddle.org.cn/packages/stable/cu126/

MASTER_PORT=15001
METADATA_PORT=15002
METRICS_PORT=15003
DASHBOARD_PORT=52790
ADDED_ROUTER_PORT=52780 # of the router that is started for the dashboard if an example has none
# The range in which Mooncake's clients choose ports. Its default, 15000 to 17000, contains the master's ports.
export MC_MIN_RPC_PORT=${MC_MIN_RPC_PORT:-17200} MC_MAX_RPC_PORT=${MC_MAX_RPC_PORT:-19999}

START_DEADLINE=300 # seconds; a large model needs minutes to load
STOP_DEADLINE=15   # seconds from TERM to KILL
LONGEST_PROMPT=2304 # tokens of prompt and answer; verify.py has the prompts

DRY_RUN=no
say() {
    # The output of a dry run can be pasted into a shell.
    if [ "$DRY_RUN" = no ]; then printf '%s\n' "$*"; elif [ -n "$*" ]; then printf '# %s\n' "$*"; fi
}
die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Sets KEEP, DASHBOARD and DRY_RUN from the command line.
parse_arguments() {
    KEEP=no DASHBOARD=no
    while [ $# -gt 0 ]; do
        case $1 in
            --keep) KEEP=yes ;;
            --dashboard) DASHBOARD=yes ;;
            --dry-run) DRY_RUN=yes ;;
            -h | --help)
                say "usage: $(basename "$0") [--keep] [--dashboard] [--dry-run]"
                say "  --keep        keep all processes running until Ctrl-C"
                say "  --dashboard   also start the dashboard, a page for a browser"
                say "  --dry-run     print the commands with their environment, and do not run them"
                say "environment: MODEL_NAME=/path/to/model|ORGANISATION/NAME MAX_MODEL_LEN=tokens DEVICE=auto|cpu|cuda"
                say "             ENGINE=kvstore|fastdeploy ROUTER=kvstore|fastdeploy"
                say "             MOONCAKE_PROTOCOL=tcp|rdma FD_DEBUG=1"
                exit 0
                ;;
            *) die "unknown argument '$1'; there are --keep, --dashboard and --dry-run" ;;
        esac
        shift
    done
}

# prepare NAME=PORT...: does everything that is necessary before the first start, the cheap checks first.
prepare() {
    if [[ ${MODEL_NAME-} == */* && -e ${MODEL_NAME-} ]]; then
        MODEL_NAME=$(realpath "$MODEL_NAME")
    fi
    cd "$HERE" || exit # otherwise Python may import packages from the user's folder instead of ours
    choose_engine
    choose_model
    check_machine
    if [ "$DASHBOARD" = yes ]; then
        [ "$ROUTER" = kvstore ] || die "ROUTER=$ROUTER --dashboard: the dashboard needs our own router; remove one of both"
        set -- "$@" "dashboard=$DASHBOARD_PORT" "the dashboard's router=$ADDED_ROUTER_PORT"
    fi
    if [ "$DRY_RUN" = no ]; then
        [ -n "${KVSTORE_PYTHON-}" ] || "$ROOT/scripts/setup"
        watched "$PYTHON" check_ports.py "$@"
        # Another example with other ports may run, and needs its logs, which would be removed below.
        mkdir -p "$ROOT/.cache"
        exec 9>"$ROOT/.cache/example.lock"
        flock -n 9 || die "another example runs in this checkout: end it first, with Ctrl-C"
    else
        printf 'cd %q\n\n' "$HERE"
    fi
    find_model # before the proxies are unset: FastDeploy may download it
    # All connections are on this machine, so curl and Mooncake must not use a proxy. curl -q ignores ~/.curlrc, which
    # may name one, too.
    unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY
    [ "$DRY_RUN" = yes ] || rm -rf log_*
    choose_transfer
    # Our processes use loopback. Without this, Mooncake looks for another interface, and fails if there is none.
    if [ "$ENGINE" = kvstore ]; then
        export MC_TCP_BIND_ADDRESS=127.0.0.1
    fi
    # Instances use the GPUs in turn, if there are any.
    if [ -n "${CUDA_VISIBLE_DEVICES-}" ]; then
        IFS=, read -ra DEVICES <<<"$CUDA_VISIBLE_DEVICES"
    else
        mapfile -t DEVICES < <(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)
    fi
}

# Ends with an error if our engine would refuse a setting later.
check_machine() {
    case ${FD_DEBUG:-0} in
        0 | 1) ;;
        *) die "FD_DEBUG=$FD_DEBUG: set it to 1 for debug logs, or to 0 for none" ;;
    esac
    [ "$ENGINE $DRY_RUN" = "kvstore no" ] || return 0
    if [ "${MOONCAKE_PROTOCOL-}" = rdma ] && [ -z "$(ls /sys/class/infiniband 2>/dev/null)" ]; then
        die "MOONCAKE_PROTOCOL=rdma: this machine has no RDMA device (/sys/class/infiniband); use tcp, or leave it unset"
    fi
    if [ "${DEVICE-}" = cuda ] && ! ls /dev/nvidia[0-9]* /dev/dxg >/dev/null 2>&1; then
        die "DEVICE=cuda: this machine has no NVIDIA device (/dev/nvidia*); use cpu, or leave it unset"
    fi
}

python_with() {
    local candidate
    for candidate in python python3 "$PYTHON"; do
        if "$candidate" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# Sets INSTANCE and ROUTER_COMMAND. The defaults are FastDeploy's engine if it can be imported, else ours, and our router.
choose_engine() {
    FASTDEPLOY=$(python_with fastdeploy) || FASTDEPLOY=
    : "${ENGINE:=$([ -n "$FASTDEPLOY" ] && echo fastdeploy || echo kvstore)}"
    : "${ROUTER:=kvstore}"
    if [[ "$ENGINE $ROUTER" == *fastdeploy* && -z $FASTDEPLOY ]]; then
        [ "$DRY_RUN" = yes ] || die "ENGINE=$ENGINE ROUTER=$ROUTER: no python here can import fastdeploy, which is not" \
            "on PyPI: python -m pip install fastdeploy-gpu -i $FASTDEPLOY_INDEX; see $FASTDEPLOY_PAGE"
        FASTDEPLOY=python
    fi
    case $ENGINE in
        # FastDeploy registers this machine's outside address, so its processes must listen there, too.
        kvstore)
            INSTANCE=("$PYTHON" -m engine.api_server --host 127.0.0.1 --device "${DEVICE:-auto}") LISTEN=127.0.0.1
            KEYS_PER_BLOCK=1
            ;;
        fastdeploy)
            INSTANCE=("$FASTDEPLOY" -m fastdeploy.entrypoints.openai.api_server) LISTEN=0.0.0.0
            KEYS_PER_BLOCK=2 # K and V
            put_backend_under_fastdeploy
            ;;
        *) die "ENGINE=$ENGINE is not known; use kvstore or fastdeploy" ;;
    esac
    case $ROUTER in
        kvstore) ROUTER_COMMAND=("$PYTHON" -m router.launch --host "$LISTEN") ;;
        fastdeploy) ROUTER_COMMAND=("$FASTDEPLOY" -m fastdeploy.router.launch) ;;
        *) die "ROUTER=$ROUTER is not known; use kvstore or fastdeploy" ;;
    esac
}

# FastDeploy loads our plugin if FD_PLUGINS names it, and then stores its blocks through our backend.
put_backend_under_fastdeploy() {
    local look='import sys; from importlib.metadata import entry_points as e
import kvstore_backend.integrations.fastdeploy
sys.exit(not e(group="fastdeploy.tool_parser_plugins", name="kvstore"))'
    if [ "$DRY_RUN" = no ] && ! "$FASTDEPLOY" -c "$look" 2>/dev/null; then
        die "ENGINE=fastdeploy: the environment of FastDeploy lacks our backend; install it with:" \
            "$FASTDEPLOY -m pip install '$ROOT[mooncake-cuda]' (with CUDA 13: '$ROOT[mooncake-cuda13]')"
    fi
    case ,${FD_PLUGINS-}, in
        *,kvstore,*) ;;
        *) FD_PLUGINS=${FD_PLUGINS:+$FD_PLUGINS,}kvstore ;;
    esac
    export FD_PLUGINS
}

choose_model() {
    if [[ -n ${MAX_MODEL_LEN-} && ! $MAX_MODEL_LEN =~ ^[1-9][0-9]*$ ]]; then
        die "MAX_MODEL_LEN=$MAX_MODEL_LEN is not a number of tokens, such as 8192"
    fi
    if [ "${MAX_MODEL_LEN:-$LONGEST_PROMPT}" -lt "$LONGEST_PROMPT" ]; then
        die "MAX_MODEL_LEN=$MAX_MODEL_LEN is too short for the prompts of this script; set at least $LONGEST_PROMPT," \
            "or leave it unset"
    fi
    if [ "$ENGINE" = fastdeploy ]; then
        : "${MODEL_NAME:=PaddlePaddle/ERNIE-4.5-0.3B-Paddle}"
    elif [ -z "${MODEL_NAME-}" ]; then
        MODEL_NAME=$SMALL_MODEL
    fi
    if [ "$MODEL_NAME" != "$SMALL_MODEL" ] && [ ! -d "$MODEL_NAME" ] && ! is_hub_name "$MODEL_NAME"; then
        die "MODEL_NAME=$MODEL_NAME: there is no such folder; give the folder of a checkpoint, its name at a hub" \
            "(ORGANISATION/NAME), or leave it unset"
    fi
}

is_hub_name() { [[ $1 =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$ ]]; }

# Sets MODEL_NAME to the folder of the checkpoint, and MAX_MODEL_LEN to the length that the model supports.
find_model() {
    make_model
    if is_hub_name "$MODEL_NAME" && [ ! -d "$MODEL_NAME" ]; then
        MODEL_NAME=$(find_hub_model) || exit
    fi
    if [ -z "${MAX_MODEL_LEN-}" ] && [ -d "$MODEL_NAME" ] && [ -x "$PYTHON" ]; then
        MAX_MODEL_LEN=$(checkpoint length "$MODEL_NAME") || exit
    fi
}

# Runs checkpoint.py, which takes a moment. Ctrl-C ends the script after it, without Python's traceback.
checkpoint() { (trap '' INT && exec "$PYTHON" checkpoint.py "$@"); }

# Prints the folder of MODEL_NAME's checkpoint. Only FastDeploy downloads it, once and before its instances start.
find_hub_model() {
    if [ "$ENGINE" = kvstore ] && [ -x "$PYTHON" ]; then
        checkpoint folder "$MODEL_NAME"
    elif checkpoint folder "$MODEL_NAME" 2>/dev/null; then
        return
    elif [ "$DRY_RUN" = yes ]; then
        echo "${FD_MODEL_CACHE:-$HOME}/${MODEL_NAME/#baidu\//PaddlePaddle/}" # the folder of the later download
    else
        "$FASTDEPLOY" -c 'import sys; from fastdeploy.utils import retrive_model_from_server as find
print(find(sys.argv[1]))' "$MODEL_NAME" | tail -n 1
    fi
}

make_model() {
    [ "$MODEL_NAME $DRY_RUN" = "$SMALL_MODEL no" ] || return 0
    say "MODEL_NAME is not set: the instances use a small model with random weights, so its answers have no meaning."
    watched "$PYTHON" -m engine.make_model --output "$SMALL_MODEL"
}

# Sets TRANSFER, FastDeploy's name for the way in which prefill transfers KV to decode: rdma, or ipc on one machine.
choose_transfer() {
    local rdma
    rdma=$(ls /sys/class/infiniband 2>/dev/null) || true
    case ${MOONCAKE_PROTOCOL:-${rdma:+rdma}} in
        rdma) TRANSFER=rdma ;;
        *) TRANSFER=ipc ;;
    esac
    # Our engine chooses the pool's protocol itself; FastDeploy's default is rdma.
    if [ "$ENGINE $TRANSFER" = "fastdeploy ipc" ]; then
        export MOONCAKE_PROTOCOL=tcp
    fi
}

# --- start and stop of processes ------------------------------------------------------------------------------

declare -A pids=() # the running processes by name
WATCHED=           # process that "watched" waits for
EXPENDABLE=        # names of processes that may end before the script does

trap stop_all EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

stop_all() {
    trap '' INT TERM HUP # a second Ctrl-C must not prevent the cleanup
    [ -z "$WATCHED" ] || kill -TERM -- "-$WATCHED" 2>/dev/null || true
    local name others=() pool=()
    for name in "${!pids[@]}"; do
        case $name in
            master* | etcd | redis) pool+=("$name") ;;
            *) others+=("$name") ;;
        esac
    done
    stop "${others[@]}"
    stop "${pool[@]}" # last, because the others use it until their end
}

# start NAME COMMAND...: runs a command in the background, in its own process group, with its output in log_NAME/nohup.
start() {
    local name=$1
    shift
    if [ "$DRY_RUN" = yes ]; then
        FD_LOG_DIR=log_$name print_command "$@"
        return
    fi
    mkdir -p "log_$name"
    FD_LOG_DIR=log_$name setsid "$@" >"log_$name/nohup" 2>&1 </dev/null 9>&- & # without the lock of "prepare"
    pids[$name]=$!
}

# print_command COMMAND...: prints the command and the environment variables that it reads, as a line for a shell.
print_command() {
    local name line
    for name in $(compgen -e | grep -E '^(FD_|MOONCAKE_|MC_|KVSTORE_|CUDA_VISIBLE_DEVICES$)'); do
        printf '%s=%q ' "$name" "${!name}"
    done
    line=$(printf '%q ' "$@")
    printf '%s\n\n' "${line% }"
}

# Prints the environment variables that clients of the pool need, as lines for a shell.
print_pool_settings() {
    local name
    for name in $(compgen -e | grep -E '^(MOONCAKE_|MC_)'); do
        printf '  export %s=%q\n' "$name" "${!name}"
    done
}

alive() { kill -0 "${pids[$1]}" 2>/dev/null; }

# stop NAME...: sends TERM to each process, and KILL to its process group after its end or at the deadline.
stop() {
    local name deadline=$((SECONDS + STOP_DEADLINE))
    [ "$DRY_RUN" = no ] || return 0
    for name in "$@"; do
        kill -TERM "${pids[$name]}" 2>/dev/null || true
    done
    for name in "$@"; do
        while alive "$name" && [ $SECONDS -lt $deadline ]; do
            sleep 0.1
        done
        kill -KILL -- "-${pids[$name]}" 2>/dev/null || true
        wait "${pids[$name]}" 2>/dev/null || true
        unset "pids[$name]"
    done
}

# give_up NAME REASON: shows the end of NAME's log and ends the script.
give_up() {
    tail -n 10 "log_$1/nohup" >&2
    die "$1 $2; the lines above are the end of its log, $HERE/log_$1/nohup"
}

# Ends the script if a process has ended that should run.
check_alive() {
    local name
    for name in "${!pids[@]}"; do
        if [[ " $EXPENDABLE " != *" $name "* ]] && ! alive "$name"; then
            give_up "$name" "ended unexpectedly"
        fi
    done
}

# wait_for NAME URL [PATTERN]: waits until URL responds with 200 and a text that matches PATTERN.
wait_for() {
    [ "$DRY_RUN" = no ] || return 0
    local name=$1 url=$2 pattern=${3-} answer deadline=$((SECONDS + START_DEADLINE))
    # The client ports differ from all ports that our processes listen on: see check_ports.py.
    until answer=$(curl -qsf --max-time 2 --local-port 61000-65535 "$url") && [[ $answer =~ $pattern ]]; do
        check_alive
        [ $SECONDS -lt $deadline ] || give_up "$name" "is not ready after $START_DEADLINE s"
        sleep 0.2
    done
}

# watched COMMAND...: runs a command and waits for its end. It also ends after Ctrl-C, and if a started process ends.
watched() {
    if [ "$DRY_RUN" = yes ]; then
        print_command "$@"
        return
    fi
    setsid "$@" 9>&- & # its own process group, to end it together with its children
    WATCHED=$!
    while kill -0 "$WATCHED" 2>/dev/null; do
        check_alive
        sleep 0.2
    done
    wait "$WATCHED" || exit
    WATCHED=
}

# --- the parts ------------------------------------------------------------------------------------------------

# Prints the path of mooncake_master: in the folder of PYTHON, or else on the PATH.
find_master() {
    local installed
    installed=$(dirname "$PYTHON")/mooncake_master
    if [ -x "$installed" ] || ! command -v mooncake_master; then echo "$installed"; fi
}

start_master() {
    say "starting the pool's master (port $MASTER_PORT)"
    start master "$(find_master)" --rpc_address=127.0.0.1 --rpc_port="$MASTER_PORT" \
        --enable_http_metadata_server=true --http_metadata_server_host=127.0.0.1 \
        --http_metadata_server_port="$METADATA_PORT" --metrics_host=127.0.0.1 --metrics_port="$METRICS_PORT"
    wait_for master "http://127.0.0.1:$METRICS_PORT/health"
}

# start_instance NAME INDEX PORT FLAGS...: INDEX chooses the GPU if there are any.
start_instance() {
    local name=$1 index=$2 port=$3 device=()
    shift 3
    if [ ${#DEVICES[@]} -gt 0 ]; then
        device=("CUDA_VISIBLE_DEVICES=${DEVICES[index % ${#DEVICES[@]}]}")
    fi
    # Several instances may start at once on one GPU, and each measures the free memory at that time.
    if [ ${#DEVICES[@]} -eq 1 ]; then
        set -- --gpu-memory-utilization 0.3 "$@"
    fi
    say "starting $name (port $port)"
    start "$name" env "${device[@]}" "${INSTANCE[@]}" --model "$MODEL_NAME" --port "$port" \
        --max-model-len "${MAX_MODEL_LEN:-32768}" --max-num-seqs 32 "$@"
}

# start_dashboard ROUTER_PORT METRICS_PORTS...: with --dashboard, starts the dashboard for a router, its instances and
# the pool's masters.
start_dashboard() {
    local port pools=()
    [ "$DASHBOARD" = yes ] || return 0
    for port in "${@:2}"; do
        pools+=(--pool "127.0.0.1:$port")
    done
    say "starting the dashboard (port $DASHBOARD_PORT)"
    start dashboard "$ROOT/.venv/bin/kvrouter" dashboard --router "127.0.0.1:$1" --port "$DASHBOARD_PORT" "${pools[@]}"
    wait_for dashboard "http://127.0.0.1:$DASHBOARD_PORT/"
    say ""
    say "    See it in a browser:  http://127.0.0.1:$DASHBOARD_PORT"
    say ""
}

# start_router_and_dashboard METRICS_PORTS...: the same for an example without a router. It also starts a router; with
# the flags in REGISTER the instances register there, so that the dashboard can show them.
start_router_and_dashboard() {
    REGISTER=()
    [ "$DASHBOARD" = yes ] || return 0
    say "starting a router for the dashboard (port $ADDED_ROUTER_PORT)"
    start router "${ROUTER_COMMAND[@]}" --port "$ADDED_ROUTER_PORT"
    wait_for router "http://127.0.0.1:$ADDED_ROUTER_PORT/registered_number"
    REGISTER=(--router "0.0.0.0:$ADDED_ROUTER_PORT")
    start_dashboard "$ADDED_ROUTER_PORT" "$@"
}

# keep PORT OTHER INSTANCES_PORTS...: prints commands to try, and waits for Ctrl-C. A prompt that was sent to PORT is
# loaded from the pool when it is sent to OTHER.
keep() {
    local name port instances=()
    [ "$DRY_RUN" = no ] || return 0
    trap 'exit 0' INT
    for port in "${@:3}"; do
        instances+=("127.0.0.1:$port")
    done
    say ""
    say "All processes keep running. In another terminal, send the same question to both ports:"
    for port in "$1" "$2"; do
        say "  curl http://127.0.0.1:$port/v1/chat/completions -H 'Content-Type: application/json' -d @$HERE/question.json"
    done
    say "The second prompt comes from the pool: see the usage in the response and the instances' logs:"
    say "  grep storage_cache_token_num $HERE/log_*/api_server.log"
    say "To look at the pool:"
    say "  . $ROOT/.venv/bin/activate"
    print_pool_settings
    say "  kvstore doctor"
    say "  kvstore stats --instances ${instances[*]}"
    say "  kvstore bench"
    [ "$DASHBOARD" = no ] || say "To see it in a browser: http://127.0.0.1:$DASHBOARD_PORT"
    say "Processes:$(for name in "${!pids[@]}"; do printf ' %s=%s' "$name" "${pids[$name]}"; done)"
    say "Ctrl-C stops everything."
    while [ ${#pids[@]} -gt 0 ]; do
        for name in "${!pids[@]}"; do
            alive "$name" && continue
            say "$name ended; the other processes keep running"
            unset "pids[$name]"
        done
        sleep 0.5
    done
}
