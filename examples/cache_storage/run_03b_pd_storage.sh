#!/usr/bin/env bash
# FastDeploy's name for run_pd_storage.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/run_pd_storage.sh" "$@"
