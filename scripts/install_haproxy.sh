#!/usr/bin/env bash
# The tests of fleets try a proxy in front of them. Where there is none and Debian's package can be had, it is installed,
# without starting its service; elsewhere that test skips itself.
set -euo pipefail
command -v haproxy >/dev/null && exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "no haproxy, and no apt-get as root to install it with: its test will be skipped" >&2
    exit 0
fi
log=$(mktemp)
policy=/usr/sbin/policy-rc.d # asked by Debian's packages whether they may start their services
made=
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    made=$policy
fi
trap 'rm -f "$log" ${made:+"$made"}' EXIT
install() { DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends haproxy >>"$log" 2>&1; }
if install || { apt-get update >>"$log" 2>&1 && install; }; then
    if command -v systemctl >/dev/null; then # neither at the next start
        systemctl disable haproxy >>"$log" 2>&1 || true
    fi
else
    tail -5 "$log" >&2
    echo "haproxy could not be installed: its test will be skipped" >&2
fi
