#!/usr/bin/env bash
# Install Fulmen without PyTorch on each Python given, and run the tests that need none.
set -euo pipefail
cd "$(dirname "$0")/.."
hash=$(cat requirements/base.txt pyproject.toml | sha256sum | cut -c1-16)
seen=""
for name in "$@"; do
    python=$(command -v "$name" || true)
    if [ -z "$python" ] || ! version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
        echo "base: $name is not installed here; not tested on it"
        continue
    fi
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
