#!/usr/bin/env bash
# Makes the environment that tests and examples run in, and prints the path of its Python on stdout.
#
#   tools/setup_env.sh [3.12 | 3.11]      default: 3.12 where it can be found, else 3.11
#
# One environment per tested pair, inside the repository: .venv-312 (Python 3.12, megatron-core 0.19.2) and .venv-311
# (Python 3.11, megatron-core 0.16.1). One that is complete for the present constraints file and setup.py is left alone.
# PGLOSS_PYTHON=/path/to/python names an interpreter that the search would not find.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
supported="3.12 3.11"

say() { printf '%s\n' "$*" >&2; }
venv_of() { printf '%s/.venv-%s' "$root" "${1//./}"; }
constraints_of() { printf '%s/constraints-py%s.txt' "$root" "${1//./}"; }

# One interpreter a line that may be Python $1, the likeliest first.
candidates() {
    [ -z "${PGLOSS_PYTHON:-}" ] || printf '%s\n' "$PGLOSS_PYTHON"
    printf '%s\n' "python$1" python3 python
    local pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
    printf '%s\n' "$pyenv_root/versions/$1".*/bin/python | sort -rV
    ! command -v uv >/dev/null || uv python find --no-project "$1" 2>/dev/null || true
}

# A shim on PATH may exist and still fail to start, and some Pythons come without venv, so each candidate is tried.
find_python() {
    local candidate
    while IFS= read -r candidate; do
        if [ "$("$candidate" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]
        then
            command -v "$candidate"
            return
        fi
    done < <(candidates "$1")
    return 1
}

# What a finished environment of Python executable $1 and version $2 was made from.
stamp_of() {
    "$1" - "$root" "$root/setup.py" "$(constraints_of "$2")" 2>/dev/null <<'PY'
import hashlib, pathlib, sys
digest = hashlib.sha256(b"".join(pathlib.Path(p).read_bytes() for p in sys.argv[2:])).hexdigest()
print(sys.version.split()[0], digest, sys.argv[1])
PY
}

is_ready() {
    local venv; venv=$(venv_of "$1")
    [ -f "$venv/.stamp" ] && [ "$(stamp_of "$venv/bin/python" "$1")" = "$(cat "$venv/.stamp")" ]
}

# Makes the environment of version $1 with the interpreter $2, or mends the one that is there.
build() {
    local venv log started=$SECONDS
    venv=$(venv_of "$1"); log=$venv/install.log
    # Scripts and the editable install hold the repository's path: one that was moved or broken is made anew.
    if ! "$venv/bin/python" -c '' 2>/dev/null || [ "$(cat "$venv/.root" 2>/dev/null)" != "$root" ]; then
        "$2" -m venv --clear "$venv"
        printf '%s\n' "$root" >"$venv/.root"
    fi
    rm -f "$venv/.stamp"
    say "environment: installing into ${venv#"$root/"} with $("$venv/bin/python" -V)." \
        "This takes minutes, and up to 6 GB where torch comes with CUDA."
    local pip=("$venv/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off
        -c "$(constraints_of "$1")")
    if ! { "${pip[@]}" setuptools && "${pip[@]}" --no-build-isolation -e "$root[cli,test]"; } \
        >"$log" 2>&1 </dev/null; then
        tail -n 15 "$log" >&2
        say "environment: pip failed; all it said is in ${log#"$root/"}"
        return 1
    fi
    stamp_of "$venv/bin/python" "$1" >"$venv/.stamp"
    say "environment: installed in $((SECONDS - started)) s"
}

lock() { # a second run that starts meanwhile waits instead of installing into the same folder
    if command -v flock >/dev/null; then
        exec 9>"$(venv_of "$1").lock"
        flock 9
    fi
}

main() {
    local wanted=${1:-} version base
    if [ -z "$wanted" ] && [ -n "${PGLOSS_PYTHON:-}" ]; then
        wanted=$("$PGLOSS_PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    fi
    wanted=${wanted:-$supported}
    for version in $wanted; do
        if [ ! -f "$(constraints_of "$version")" ]; then
            say "environment: Python $version is not one of the tested versions ($supported)"
            return 2
        fi
        if is_ready "$version"; then
            say "environment: $(basename "$(venv_of "$version")") is up to date"
        elif base=$(find_python "$version"); then
            lock "$version"
            is_ready "$version" || build "$version" "$base" || return 1
        else
            continue
        fi
        printf '%s/bin/python\n' "$(venv_of "$version")"
        return 0
    done
    say "environment: found no Python ${wanted// / or } that starts and has venv and ensurepip."
    say "Looked on PATH (python3.x, python3, python), under pyenv (${PYENV_ROOT:-$HOME/.pyenv}/versions) and in uv."
    say "Install one, or name it: PGLOSS_PYTHON=/path/to/python"
    return 3
}

main "$@"
