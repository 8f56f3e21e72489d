#!/usr/bin/env bash
# FastDeploy's name for run_pd_storage.sh.
exec bash "$(dirname "$0")/run_pd_storage.sh" "$@"
