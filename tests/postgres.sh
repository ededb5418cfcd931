#!/usr/bin/env bash
# Have PostgreSQL's programs for the tests: those of the system, else Debian's packages unpacked
# into a folder here. Nothing is installed, and root is not needed.
set -euo pipefail
cd "$(dirname "$0")/.."
if command -v initdb > /dev/null || compgen -G "/usr/lib/postgresql/*/bin/initdb" > /dev/null; then
    exit 0
fi
if compgen -G ".postgres-*/usr/lib/postgresql/*/bin/initdb" > /dev/null; then
    exit 0
fi
if ! command -v apt-get > /dev/null; then
    echo "error: no PostgreSQL here, and no apt-get to bring it; install it, so that initdb is in PATH" >&2
    exit 1
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial"
apt() {
    apt-get -q -o Dir::State::lists="$scratch/lists" -o Dir::Cache="$scratch/cache" \
        -o Debug::NoLocking=1 -o APT::Sandbox::User="" "$@"
}
apt update > "$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }
# What an installation would bring beside what is there already: the server and its libraries.
wanted=$(apt install --simulate --no-install-recommends postgresql | awk '$1 == "Inst" { print $2 }')
version=$(grep -oE '^postgresql-[0-9]+$' <<< "$wanted" | head -1)
folder=".postgres-${version#postgresql-}"
echo "unpacking $version into $folder"
(cd "$scratch" && apt download $wanted > log 2>&1) || { cat "$scratch/log" >&2; exit 1; }
rm -rf "$folder" "$folder.new"
for package in "$scratch"/*.deb; do
    dpkg-deb -x "$package" "$folder.new"
done
mv "$folder.new" "$folder"
