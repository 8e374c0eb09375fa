#!/usr/bin/env bash
# tests/browser/chromium.sh   Install Debian's chromium where there is none.
set -euo pipefail
command -v chromium >/dev/null && exit
if [ "$(id -u)" != 0 ]; then
    echo "error: chromium: is not installed: run as root: apt-get install chromium" >&2
    exit 2
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
