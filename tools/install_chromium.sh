#!/bin/sh
# Debian's Chromium, its driver and a font for screenshots, unless they are there. By root, or through sudo.
set -eu
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    exit 0
fi
fail() {
    echo "error: chromium and chromedriver must be installed, got none; $1" >&2
    exit 1
}
command -v apt-get >/dev/null || fail "there is no apt-get here: install both by hand, on the path"
if [ "$(id -u)" -eq 0 ]; then
    as_root=
else
    command -v sudo >/dev/null || fail "run this as root: apt-get install chromium chromium-driver"
    as_root=sudo
fi
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -qq || fail "apt-get update failed"
# Ubuntu has no such packages: its apt would put a stub there that a snap stands behind, without this driver.
for package in chromium chromium-driver; do
    apt-cache show "$package" >/dev/null 2>&1 ||
        fail "apt has no package $package here; on Ubuntu: snap install chromium, then ln -s \
/snap/bin/chromium.chromedriver /usr/local/bin/chromedriver; elsewhere install both by hand, on the path"
done
$as_root apt-get install --yes --quiet --no-install-recommends chromium chromium-driver fonts-inter ||
    fail "apt-get install failed"
