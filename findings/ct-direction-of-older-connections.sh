#!/usr/bin/env bash
# `ct direction reply` does not match the answers of a connection that is older than the first rule with `ct`.
#
# One would guess: `ct direction reply` matches what the server sends, since the direction says who opened the connection. For connections that
# were open before, too: a rule does not care when a connection began, and the kernel goes on with old ones (`nf_conntrack_tcp_loose` is 1).
# Seen: a network namespace without a rule that needs connection tracking tracks nothing. Once there is one, the first packet of a connection that
# the kernel sees counts as its first: if the server sends it, its packets are of the direction `original` from then on, and those of the client
# `reply`. If the client sends it, all is as expected. The same for TCP and UDP, in IPv4 and IPv6.
# Why it matters: a rule for answers by their direction, such as a mark by which they are routed back, or one that accepts them and drops the
# rest, works in each test that opens a connection, and turns round long ones (watches, SSH, database connections) when it is loaded for the first
# time. They are mended by opening them anew, so the fault is gone before it is found.
#
# Real: the kernel of this machine, in a network namespace of its own; ip(8), ss(8), nft(8) and nc(1) of Debian 12. Nothing leaves it. Run as root.
set -euo pipefail

declare -A versions=([iproute2]=6.1.0-3 [nftables]=1.0.6-2+deb12u2 [libnftables1]=1.0.6-2+deb12u2 [netcat-openbsd]=1.219-1)
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
export ip=$directory/root/bin/ip ss=$directory/root/bin/ss nft=$directory/root/usr/sbin/nft nc=$directory/root/bin/nc.openbsd
export LD_LIBRARY_PATH=$directory/root/usr/lib/$(uname -m)-linux-gnu
echo "kernel $(uname -r), $("$ip" -V), $("$nft" --version)"
cd "$directory"

unshare --net --pid --fork --kill-child bash -euo pipefail -s <<'INSIDE'
failed=0
"$ip" link set lo up

wait_for() {
    for _ in {1..200}; do
        if "$@"; then return; fi
        sleep 0.05
    done
    echo "failed: $*"
    exit 1
}
listens() { [ -n "$("$ss" -Hlntu "sport = :$1")" ]; }
heard() { grep -q "$1" "$2"; }

# Opens a connection to this port and sends a line to the server, so that both ends know each other.
open() {
    local address=$1 port=$2 options=${3:-}
    mkfifo "server-$port" "client-$port"
    # Their standard inputs end with this shell.
    exec {kept}<>"server-$port" {kept}<>"client-$port"
    "$nc" -n -l $options "$address" "$port" <"server-$port" >"at-server-$port" &
    wait_for listens "$port"
    "$nc" -n $options "$address" "$port" <"client-$port" >"at-client-$port" &
    say client "$port" first
}
# One end sends a line, and the other end has it.
say() {
    local end=$1 port=$2 line=$3 other=server
    if [ "$end" = server ]; then other=client; fi
    echo "$line" >"$end-$port"
    wait_for heard "$line" "at-$other-$port"
}
# The direction of all packets from the server to the client.
expect() {
    local what=$1 want=$2 port=$3 got="" counted
    for direction in original reply; do
        counted=$("$nft" list counter inet judge "$direction-$port")
        if [[ $counted != *"packets 0 "* ]]; then got+=$direction; fi
    done
    if [ "$got" = "$want" ]; then
        echo "ok: $what: answers are $got"
    else
        echo "changed: $what: answers are ${got:-none}, not $want"
        failed=1
    fi
}

open 127.0.0.1 7001
open ::1 7002
open 127.0.0.1 7003 -u
open 127.0.0.1 7004

# The first rules with `ct` of this namespace.
{
    echo "add table inet judge; add chain inet judge sent { type filter hook output priority 0; }"
    for port in 7001 7002 7003 7004 7011 7012 7013; do
        for direction in original reply; do
            echo "add counter inet judge $direction-$port"
            echo "add rule inet judge sent meta l4proto { tcp, udp } th sport $port ct direction $direction counter name $direction-$port"
        done
    done
} | "$nft" -f -

say client 7004 second
for port in 7001 7002 7003 7004; do say server "$port" answer; done
expect "TCP, IPv4, opened before the rules, the server sends first" original 7001
expect "TCP, IPv6, opened before the rules, the server sends first" original 7002
expect "UDP, IPv4, opened before the rules, the server sends first" original 7003
expect "TCP, IPv4, opened before the rules, the client sends first" reply 7004
# What the client sends later changes nothing.
say client 7001 later
say server 7001 again
expect "TCP, IPv4, opened before the rules, both have sent" original 7001

open 127.0.0.1 7011
open ::1 7012
open 127.0.0.1 7013 -u
for port in 7011 7012 7013; do say server "$port" answer; done
expect "TCP, IPv4, opened after the rules" reply 7011
expect "TCP, IPv6, opened after the rules" reply 7012
expect "UDP, IPv4, opened after the rules" reply 7013
exit "$failed"
INSIDE
