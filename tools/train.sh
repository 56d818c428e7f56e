#!/usr/bin/env bash
# Installs what is missing and trains a small model with the loss: 4 processes on this machine, TP 2 x PP 2, no GPU needed.
#
#   tools/train.sh [--python 3.12 | --python 3.11] [arguments of examples/train_rl.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=
case ${1:-} in
    --python) version=${2:?--python needs a version, 3.12 or 3.11}; shift 2 ;;
    -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
started=$SECONDS
# shellcheck disable=SC2086  no version means no argument
python=$(bash tools/setup_env.sh $version)
installed=$SECONDS
export OMP_NUM_THREADS=1
rc=0
"$python" -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_rl.py "$@" || rc=$?
printf 'time: environment %d s, run %d s\n' $((installed - started)) $((SECONDS - installed))
exit "$rc"
