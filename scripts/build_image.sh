#!/usr/bin/env bash
# Builds xlaserve:latest, and xlaserve:demo with the models of the demonstration, where there is neither Docker nor a
# registry of images: with buildah, on a Debian that debootstrap makes. Needs root and Debian's packages of both.
# usage: scripts/build_image.sh [cpu|gpu]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-cpu}
base=localhost/debian:bookworm-slim

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    debootstrap --variant=minbase --include=ca-certificates bookworm "$folder"
    rm -rf "$folder"/var/{cache/apt,lib/apt/lists,log}/* "$folder"/usr/share/{doc,info,locale,man}/*
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$folder" /
    buildah commit --quiet --rm "$container" "$base"
fi

# How this machine reaches the registry of packages, a proxy's authority for instance. None of it stays in the image.
shared=()
for path in /etc/ssl/certs /etc/pip.conf; do
    [ ! -e "$path" ] || shared+=(--volume "$path:$path:ro")
done
# chroot: no container runtime is needed. docker: the format that has health checks.
build() { buildah build --isolation chroot --format docker --quiet "${shared[@]}" "$@" >/dev/null; }
build --file deploy/Dockerfile --layers --tag xlaserve:latest --build-arg BASE="$base" --build-arg BUILD="$build" \
    --build-arg REVISION="$(git rev-parse HEAD)" .
build --file deploy/models.Dockerfile --tag xlaserve:demo --build-arg IMAGE=localhost/xlaserve:latest \
    --build-arg CONFIG=demo.yaml deploy
buildah images
