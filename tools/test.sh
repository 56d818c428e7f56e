#!/usr/bin/env bash
# Installs what is missing and runs the tests: minutes on two cores.
#
#   tools/test.sh [--all-pythons | --python 3.12 | --python 3.11] [pytest arguments]
#
# --all-pythons runs both tested pairs, one after the other, and needs both Pythons. Without an option: the first found,
# 3.12 before 3.11. Fails if a test fails, and if no test ran. Of pytest's arguments, these are the suite's own:
#
#   --exhaustive     every layout with every spec, every dtype with every case: half an hour instead of minutes
#   --shuffle SEED   files, and the tests in each, in a random order
#   --lines FILE     which lines of the package each test runs, for tools/mutate.py (Python 3.12)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
versions=("")
case ${1:-} in
    --all-pythons) versions=(3.12 3.11); shift ;;
    --python) versions=("${2:?--python needs a version, 3.12 or 3.11}"); shift 2 ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
export OMP_NUM_THREADS=1

# "N passed, ..." of a JUnit file; fails where nothing ran.
read_counts() {
    "$1" - "$2" <<'PY'
import sys
import xml.etree.ElementTree as ET

suite = ET.parse(sys.argv[1]).getroot().find("testsuite")
total, skipped, bad = (int(suite.get(k)) for k in ("tests", "skipped", "failures"))
bad += int(suite.get("errors"))
print(f"{total - skipped - bad} passed, {bad} failed, {skipped} skipped")
sys.exit(total == skipped)
PY
}

run_pair() { # sets $line; returns the verdict
    local python name started=$SECONDS installed rc=0 counts="no results"
    line="${1:-default Python}: no environment"
    # shellcheck disable=SC2086  no version means no argument
    python=$(bash tools/setup_env.sh $1) || return 1
    name=$("$python" -c 'import importlib.metadata as m, platform as p
print("Python", p.python_version(), "+ megatron-core", m.version("megatron-core"), "+ torch", m.version("torch"))')
    printf 'tests: %s\n' "$name"
    local results=.test-results/py$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])').xml
    rm -f "$results"
    installed=$SECONDS
    "$python" -m pytest -q --junitxml="$results" "${@:2}" </dev/null || rc=$?
    if [ -f "$results" ] && ! counts=$(read_counts "$python" "$results"); then
        counts="$counts: no test ran"
        rc=1
    fi
    line="$name: $counts; environment $((installed - started)) s, tests $((SECONDS - installed)) s, exit code $rc"
    return "$rc"
}

summary=()
worst=0
for version in "${versions[@]}"; do
    run_pair "$version" "$@" || worst=$?
    summary+=("$line")
done
printf 'tests: %s\n' "${summary[@]}"
exit "$worst"
