#!/usr/bin/env bash
# In a network namespace that has never had an address, a socket binds to every IPv4 address.
#
# One would guess: bind(2) to an address that the namespace does not have fails with EADDRNOTAVAIL ("Cannot assign requested address"), unless
# net.ipv4.ip_nonlocal_bind or IP_FREEBIND is set. So whether it succeeds tells whether a pod's namespace has the pod's address.
# Seen: it succeeds for every IPv4 address until the namespace has had its first one, also 127.0.0.1 by `ip link set lo up`: before, there is
# no table `local`, and the kernel takes every address for a broadcast one. Afterwards it fails, also when `lo` is down again. In IPv6 it fails
# from the beginning.
# Why it matters: a program that looks for the namespace of an address among those of running pods finds one that a container runtime
# has just made as well, and a server that starts before `lo` is up listens on an address that it does not have, without an error.
#
# Real: the kernel of this machine; ip(8), nc(1) and unshare(1) of Debian 12. Nothing leaves the namespaces. Run as root.
set -euo pipefail

declare -A versions=([iproute2]=6.1.0-3 [netcat-openbsd]=1.219-1)
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
chmod 755 "$directory"
(
    cd "$directory"
    for package in "${!versions[@]}"; do
        apt-get download "$package=${versions[$package]}" >/dev/null 2>&1
        dpkg -x "$package"_*.deb root
    done
)
export ip=$directory/root/bin/ip nc=$directory/root/bin/nc.openbsd
echo "kernel $(uname -r), $("$ip" -V), netcat-openbsd ${versions[netcat-openbsd]}"

unshare --net bash -uo pipefail -s <<'INSIDE'
failed=0
# nc listens until its time is over (status 124), or cannot.
expect() {
    local what=$1 want=$2 address=$3 got=bound
    timeout 0.3 "$nc" -u -n -l "$address" 9999 </dev/null >/dev/null 2>&1
    if [ $? -ne 124 ]; then got=refused; fi
    if [ "$got" = "$want" ]; then
        echo "ok: $what, $address: $got"
    else
        echo "changed: $what, $address: $got, not $want"
        failed=1
    fi
}
expect "fresh namespace" bound 192.0.2.66
expect "fresh namespace" bound 203.0.113.7
expect "fresh namespace" refused 2001:db8::66
"$ip" link set lo up
expect "lo is up" refused 192.0.2.66
expect "lo is up" refused 2001:db8::66
"$ip" link set lo down
expect "lo is down again" refused 192.0.2.66
exit "$failed"
INSIDE
