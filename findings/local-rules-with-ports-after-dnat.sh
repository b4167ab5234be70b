#!/usr/bin/env bash
# A policy rule with `iif lo` and a port does not match a packet that DNAT has just given that port's address.
#
# One would guess: `ip rule add to SERVER iif lo ipproto tcp dport 6443 lookup N` matches all connections of this host to SERVER:6443, also those
# that a proxy of Services (nftables, iptables: `dnat to SERVER:6443` in the hook output) leads there, since the kernel routes them again
# with the new destination. And a rule that matches one connection goes on to do so when an unrelated rule is deleted.
# Seen: with `iif lo`, the rule matches connections to SERVER:6443 itself, and none that were translated: the kernel reads ports out of a packet
# that is routed again only if some rule *without* `iif lo` has a port or a protocol. One such rule, for any address at all, and the first
# one matches; without it, it does not. The same in IPv6.
# Why it matters: exceptions for the API server, which hosts of an overlay reach by its Service or directly, work in tests without a
# proxy, and beside any other rule with a port.
#
# Real: the kernel of this machine, in two network namespaces of its own; ip(8), nft(8) and nc of Debian 12. Nothing leaves them. Run as root.
set -euo pipefail

declare -A versions=([iproute2]=6.1.0-3 [nftables]=1.0.6-2+deb12u2 [libnftables1]=1.0.6-2+deb12u2 [netcat-openbsd]=1.219-1)
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
(
    cd "$directory"
    for package in "${!versions[@]}"; do
        apt-get download "$package=${versions[$package]}" >/dev/null
        dpkg -x "$package"_*.deb root
    done
)
export ip=$directory/root/bin/ip nft=$directory/root/usr/sbin/nft nc=$directory/root/bin/nc.openbsd
export LD_LIBRARY_PATH=$directory/root/usr/lib/$(uname -m)-linux-gnu
echo "kernel $(uname -r), $("$ip" -V), $("$nft" --version)"

unshare --net --mount --pid --fork --kill-child bash -euo pipefail -s <<'INSIDE'
mount -t tmpfs none /run
mkdir -p /run/netns
failed=0
"$ip" netns add far
"$ip" link add up0 type veth peer name up0 netns far
for inside in "" "netns exec far $ip"; do
    for link in lo up0; do "$ip" $inside link set "$link" up; done
done
"$ip" address add 192.0.2.1/24 dev up0
"$ip" address add 2001:db8::1/64 dev up0 nodad
"$ip" netns exec far "$ip" address add 192.0.2.2/24 dev up0
"$ip" netns exec far "$ip" address add 2001:db8::2/64 dev up0 nodad
"$ip" route add default via 192.0.2.2
"$ip" -6 route add default via 2001:db8::2
"$nft" -f - <<NFT
table inet services {
    chain output {
        type nat hook output priority -100
        ip daddr 10.96.0.1 tcp dport 443 dnat ip to 192.0.2.2:6443
        ip6 daddr fd96::1 tcp dport 443 dnat ip6 to [2001:db8::2]:6443
    }
}
NFT
for address in 192.0.2.2 2001:db8::2; do
    "$ip" netns exec far "$nc" -l -k -n "$address" 6443 >/dev/null </dev/null &
done
sleep 1

expect() {
    local what=$1 want=$2 address=$3 port=$4 got=refused
    if "$nc" -z -n -w 2 "$address" "$port"; then got=connected; fi
    if [ "$got" = "$want" ]; then
        echo "ok: $what: $got"
    else
        echo "changed: $what: $got, not $want"
        failed=1
    fi
}
check() {
    local family=$1 server=$2 service=$3
    expect "IPv$family, no rules, by the Service" connected "$service" 443
    # An overlay: everything to the server, but for one port.
    "$ip" "-$family" rule add pref 101 to "$server" iif lo ipproto tcp dport 6443 lookup main
    "$ip" "-$family" rule add pref 102 to "$server" iif lo lookup 102
    "$ip" "-$family" route add blackhole "$server" table 102
    expect "IPv$family, rule with iif lo and port, direct" connected "$server" 6443
    expect "IPv$family, rule with iif lo and port, by the Service" refused "$service" 443
    # A rule that matches none of these packets.
    "$ip" "-$family" rule add pref 200 from "$server" ipproto udp dport 9 lookup main
    expect "IPv$family, beside a rule with a port and without iif, by the Service" connected "$service" 443
}
check 4 192.0.2.2 10.96.0.1
check 6 2001:db8::2 fd96::1
exit "$failed"
INSIDE
