#!/usr/bin/env bash
# usage: install_package.sh PACKAGE PROGRAM ...
# Some tests need programs of others. Where a PROGRAM is missing and Debian's PACKAGE can be had, that is installed, without
# starting its service; elsewhere those tests skip themselves.
set -euo pipefail
package=$1
missing=
for program in "${@:2}"; do command -v "$program" >/dev/null || missing=$program; done
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "no $package, and no apt-get as root to install it with: tests that need it will be skipped" >&2
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
install() { DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$package" >>"$log" 2>&1; }
if install || { apt-get update >>"$log" 2>&1 && install; }; then
    if command -v systemctl >/dev/null; then # neither at the next start
        systemctl disable "$package" >>"$log" 2>&1 || true
    fi
else
    tail -5 "$log" >&2
    echo "$package could not be installed: tests that need it will be skipped" >&2
fi
