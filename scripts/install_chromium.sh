#!/usr/bin/env bash
# The test that looks at the HTML report needs a browser. Where there is none and Debian's packages can be had, it is
# installed; elsewhere that test skips itself.
set -euo pipefail
command -v chromium >/dev/null && exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "no chromium, and no apt-get as root to install it with: the browser test will be skipped" >&2
    exit 0
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() { DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium >>"$log" 2>&1; }
if ! install; then
    { apt-get update >>"$log" 2>&1 && install; } || {
        tail -5 "$log" >&2
        echo "chromium could not be installed: the browser test will be skipped" >&2
    }
fi
