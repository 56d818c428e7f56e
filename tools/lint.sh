#!/usr/bin/env bash
# Style, types, layers and circles of imports: ruff, mypy, import-linter, tools/circles.py. Runs all of them and fails if
# one does.
#
#   tools/lint.sh [--fix]      --fix lets ruff repair and format first
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(bash tools/setup_env.sh) || exit 1
bin=$(dirname "$python")
failed=()
check() {
    printf 'lint: %s\n' "$*"
    "$bin/$1" "${@:2}" </dev/null || failed+=("$*")
}
if [ "${1:-}" = --fix ]; then
    "$bin/ruff" check -q --fix-only .
    "$bin/ruff" format -q .
fi
check ruff check -q --output-format concise .
check ruff format -q --check --output-format concise .
check mypy --no-error-summary
check lint-imports --no-logo
check python tools/circles.py
if [ ${#failed[@]} -gt 0 ]; then
    printf 'lint: failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "lint: clean"
