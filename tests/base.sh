#!/usr/bin/env bash
# Install Fulmen without PyTorch on each Python given, and run the tests that need none.
set -euo pipefail
cd "$(dirname "$0")/.."
hash=$(cat requirements/base.txt pyproject.toml | sha256sum | cut -c1-16)
seen=""
# pyenv's shims exist for versions that are not active; look behind them.
find_python() {
    local path
    for path in "$(command -v "$1")" "$(pyenv root 2>/dev/null)"/versions/"${1#python}".*/bin/python3; do
        if [ -x "$path" ] && "$path" -c "" 2>/dev/null; then echo "$path"; return; fi
    done
}
for name in "$@"; do
    python=$(find_python "$name")
    if [ -z "$python" ]; then
        echo "base: $name is not installed here; not tested on it"
        continue
    fi
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    case " $seen " in *" $version "*) continue ;; esac
    seen="$seen $version"
    venv=".venv-base-$version"
    if [ ! -f "$venv/$hash.ready" ]; then
        rm -rf "$venv"
        "$python" -m venv "$venv"
        grep -E '^(pytest|pytest-asyncio|pytest-timeout|hypothesis|openai|httpx2)==' requirements/dev.txt > "$venv/tests.txt"
        "$venv/bin/pip" install -q -r requirements/base.txt -r "$venv/tests.txt"
        "$venv/bin/pip" install -q --no-deps --editable .
        touch "$venv/$hash.ready"
    fi
    echo "base: Python $version without PyTorch"
    "$venv/bin/python" -m pytest -q -m "not e2e" tests/base
done
