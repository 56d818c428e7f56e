#!/usr/bin/env bash
# Compares this package with verl 0.9.1 and fails where they differ unexplained (tools/compare_verl/).
#
#   tools/compare_verl.sh [--write docs/verl.md | --check docs/verl.md]
#
# verl goes into an environment of its own, .venv-verl, which reads torch from that of tools/setup_env.sh; about 0.5 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
base=$(bash tools/setup_env.sh 3.12)
venv=.venv-verl
stamp=$(cat tools/compare_verl/requirements.txt; printf '%s' "$base")
if [ "$(cat "$venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
    "$base" -m venv --clear "$venv"
    "$base" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
        >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/base.pth"
    pip=("$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --progress-bar off)
    "${pip[@]}" -r tools/compare_verl/requirements.txt </dev/null
    # shellcheck disable=SC2046  one word each
    "${pip[@]}" --no-deps $(sed -n 's/^# *no-deps: //p' tools/compare_verl/requirements.txt) </dev/null
    printf '%s' "$stamp" >"$venv/.stamp"
fi
OMP_NUM_THREADS=1 PYTHONPATH=.:tools "$venv/bin/python" -W ignore -m compare_verl "$@" </dev/null
