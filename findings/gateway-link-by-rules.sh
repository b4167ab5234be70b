#!/usr/bin/env bash
# The link of a gateway is found by the policy rules, not by the connected routes.
#
# One would guess: `ip route add PREFIX via GATEWAY` without `dev` takes the link whose subnet has the gateway, and refuses a gateway on no
# subnet ("Nexthop has invalid gateway"). Rules (`ip rule`) are for packets.
# Seen: in IPv4 the kernel looks up the gateway with all rules, as a packet without a mark. If a rule before `main` leads the gateway's address into a
# device (a VPN, an overlay between hosts), the new route goes through that device, though the gateway is a neighbour on the
# uplink, and no error is printed. In IPv6 the same happens for routes in any table but `main`, where the connected route counts.
# Why it matters: on a host of such an overlay, `ip route add default via OTHER-HOST table 77` sends into the overlay what should go past it,
# and with it the overlay's own packets, if a rule leads them there. `dev` prevents it.
#
# Real: the kernel of this machine, in a network namespace of its own; ip(8) of Debian 12. Nothing leaves the namespace. Run as root.
set -euo pipefail

version=6.1.0-3
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
(
    cd "$directory"
    apt-get download "iproute2=$version" >/dev/null
    dpkg -x iproute2_*.deb root
)
export ip=$directory/root/bin/ip
echo "kernel $(uname -r), $("$ip" -V)"

unshare --net bash -euo pipefail -s <<'INSIDE'
failed=0
expect() {
    local what=$1 want=$2 got=$3
    if [[ $got == *" $want "* ]]; then
        echo "ok: $what: $got"
    else
        echo "changed: $what: $got, not $want"
        failed=1
    fi
}
"$ip" link add up0 type veth peer name far0
for link in lo up0 far0; do "$ip" link set "$link" up; done
"$ip" address add 192.0.2.1/24 dev up0
"$ip" address add 2001:db8::1/64 dev up0 nodad
"$ip" tuntap add overlay0 mode tun
"$ip" link set overlay0 up

"$ip" route add 203.0.113.0/24 via 192.0.2.2
expect "IPv4, no rule" "dev up0" "$("$ip" route show 203.0.113.0/24) "
"$ip" route del 203.0.113.0/24

# As overlays have it that lead other hosts' addresses into their device.
"$ip" rule add pref 100 lookup 100
"$ip" -6 rule add pref 100 lookup 100
"$ip" route add 192.0.2.2/32 dev overlay0 table 100
"$ip" -6 route add 2001:db8::2/128 dev overlay0 table 100

"$ip" route add 203.0.113.0/24 via 192.0.2.2
expect "IPv4, main, with a rule" "dev overlay0" "$("$ip" route show 203.0.113.0/24) "
"$ip" route add default via 192.0.2.2 table 77
expect "IPv4, another table, with a rule" "dev overlay0" "$("$ip" route show table 77) "
"$ip" route replace default via 192.0.2.2 dev up0 table 77
expect "IPv4, another table, with dev" "dev up0" "$("$ip" route show table 77) "
"$ip" -6 route add 2001:db8:1::/64 via 2001:db8::2
expect "IPv6, main, with a rule" "dev up0" "$("$ip" -6 route show 2001:db8:1::/64) "
"$ip" -6 route add default via 2001:db8::2 table 77
expect "IPv6, another table, with a rule" "dev overlay0" "$("$ip" -6 route show table 77) "
exit "$failed"
INSIDE
