// SPDX-License-Identifier: Apache-2.0
//
// Outer headers in front of a packet of a tunnel link.

#pragma once

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "flow.h"
#include "layout.h"

#define OUTER_TTL 225
#define AUTO_PORT_BASE 49152 /* RFC 6335 dynamic ports: 2^14 of them */
#define AUTO_PORT_SHIFT 18

/* ECN field of the outer header, RFC 6040 normal mode; nothing else of the inner one is copied. */
static __always_inline __u8 outer_ecn(__u8 tos)
{
	return tos & 3;
}

static __always_inline __u16 ip_sum(const struct iphdr *ip)
{
	__s64 sum = bpf_csum_diff(0, 0, (__be32 *)ip, sizeof(*ip), 0);

	sum = (sum & 0xffff) + ((sum >> 16) & 0xffff);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

static __always_inline __be16 source_port(const struct link *l, const struct flow *f)
{
	return l->sport ? l->sport : bpf_htons(AUTO_PORT_BASE + (hash_flow(f) >> AUTO_PORT_SHIFT));
}

/* The length of a packet that is yet to be segmented may exceed the field; segmentation sets the field. */
static __always_inline __be16 length(__u32 n)
{
	return n > 0xffff ? 0 : bpf_htons(n);
}

static __always_inline int encapsulate4(struct __sk_buff *skb, const struct link *l, __be16 port, __u32 uplink)
{
	struct {
		struct iphdr ip;
		struct udphdr udp;
	} h = {};
	__u32 n = skb->len - ETH_HLEN + sizeof(h);
	struct flow f = {};
	__u8 tos;

	if (read_flow4(skb, ETH_HLEN, &f, &tos))
		return drop(COUNT_MALFORMED);
	h.ip.version = 4;
	h.ip.ihl = 5;
	h.ip.tos = outer_ecn(tos);
	h.ip.tot_len = length(n);
	h.ip.id = bpf_get_prandom_u32(); /* the packet may be fragmented on its way */
	h.ip.ttl = OUTER_TTL;
	h.ip.protocol = IPPROTO_UDP;
	h.ip.saddr = l->local.w[3];
	h.ip.daddr = is_zero(&l->remote) ? f.dst.w[3] : l->remote.w[3];
	h.ip.check = ip_sum(&h.ip);
	h.udp.source = source_port(l, &f);
	h.udp.dest = port;
	h.udp.len = length(n - sizeof(h.ip));
	if (is_zero(&l->remote))
		count_received(skb, &f.dst, n - sizeof(h));
	/* Segments keep their size: the link's MTU already leaves room for the outer headers. */
	if (bpf_skb_adjust_room(skb, sizeof(h), BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 |
					BPF_F_ADJ_ROOM_ENCAP_L4_UDP) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &h, sizeof(h), 0))
		return drop(COUNT_FAILED);
	count(COUNT_ENCAPSULATED);
	return bpf_redirect_neigh(uplink, 0, 0, 0);
}

static __always_inline int encapsulate6(struct __sk_buff *skb, const struct link *l, __be16 port, __u32 uplink)
{
	struct {
		struct ipv6hdr ip;
		struct udphdr udp;
	} h = {};
	__u32 n = skb->len - ETH_HLEN + sizeof(h.udp);
	struct flow f = {};
	__u8 tos;

	if (read_flow6(skb, ETH_HLEN, &f, &tos) || (f.dst.w[0] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000))
		return drop(COUNT_MALFORMED); /* the kernel's own router and listener messages to ff02:: too */
	h.ip.version = 6;
	h.ip.flow_lbl[0] = outer_ecn(tos) << 4;
	h.ip.payload_len = length(n);
	h.ip.nexthdr = IPPROTO_UDP;
	h.ip.hop_limit = OUTER_TTL;
	__builtin_memcpy(&h.ip.saddr, &l->local, sizeof(l->local));
	__builtin_memcpy(&h.ip.daddr, is_zero(&l->remote) ? &f.dst : &l->remote, sizeof(l->remote));
	h.udp.source = source_port(l, &f);
	h.udp.dest = port;
	h.udp.len = length(n); /* no checksum: RFC 6935 allows that for tunnels */
	if (is_zero(&l->remote))
		count_received(skb, &f.dst, n - sizeof(h.udp));
	if (bpf_skb_adjust_room(skb, sizeof(h), BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 |
					BPF_F_ADJ_ROOM_ENCAP_L4_UDP) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &h, sizeof(h), 0))
		return drop(COUNT_FAILED);
	count(COUNT_ENCAPSULATED);
	return bpf_redirect_neigh(uplink, 0, 0, 0);
}
