// SPDX-License-Identifier: Apache-2.0
//
// Addresses, and the flow of an IP packet with its hash.

#pragma once

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "layout.h"

#define IP_FRAGMENT 0x3fff /* more-fragments flag and fragment offset */

static __always_inline struct addr addr4(__be32 a)
{
	struct addr r = { { 0, 0, bpf_htonl(0xffff), a } };

	return r;
}

static __always_inline struct addr addr6(const struct in6_addr *a)
{
	struct addr r = { { a->in6_u.u6_addr32[0], a->in6_u.u6_addr32[1], a->in6_u.u6_addr32[2],
			    a->in6_u.u6_addr32[3] } };

	return r;
}

static __always_inline int same(const struct addr *a, const struct addr *b)
{
	return a->w[0] == b->w[0] && a->w[1] == b->w[1] && a->w[2] == b->w[2] && a->w[3] == b->w[3];
}

static __always_inline int is_zero(const struct addr *a)
{
	return !(a->w[0] | a->w[1] | a->w[2] | a->w[3]);
}

/* One round of the finalizer of MurmurHash3 over the state and one more word. */
static __always_inline __u32 mix(__u32 h, __u32 w)
{
	h ^= w;
	h ^= h >> 16;
	h *= 0x85ebca6b;
	h ^= h >> 13;
	h *= 0xc2b2ae35;
	return h ^ (h >> 16);
}

static __always_inline __u32 mix_addr(__u32 h, const struct addr *a)
{
	h = mix(h, a->w[0]);
	h = mix(h, a->w[1]);
	h = mix(h, a->w[2]);
	return mix(h, a->w[3]);
}

/*
 * Not skb->hash: the kernel changes the hash of a TCP socket after retransmission timeouts
 * (sk_rethink_txhash), and the source port would change with it.
 */
static __always_inline __u32 hash_flow(const struct flow *f)
{
	__u32 h = mix_addr(mix_addr(0x9e3779b9, &f->src), &f->dst);

	h = mix(h, ((__u32)f->sport << 16) | f->dport);
	return mix(h, f->proto);
}

/* Ports of a TCP or UDP packet; ICMP has none, so that an error finds its gateway by addresses alone. */
static __always_inline int read_ports(struct __sk_buff *skb, __u32 off, struct flow *f)
{
	__be16 ports[2];

	if (f->proto != IPPROTO_TCP && f->proto != IPPROTO_UDP)
		return 0;
	if (bpf_skb_load_bytes(skb, off, ports, sizeof(ports)))
		return -1;
	f->sport = ports[0];
	f->dport = ports[1];
	return 0;
}

/* The flow of the IPv4 packet at `off`; of fragments only the addresses, as later ones have no ports. */
static __always_inline int read_flow4(struct __sk_buff *skb, __u32 off, struct flow *f, __u8 *tos)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, off, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
		return -1;
	f->src = addr4(ip.saddr);
	f->dst = addr4(ip.daddr);
	f->proto = ip.protocol;
	*tos = ip.tos;
	if (ip.frag_off & bpf_htons(IP_FRAGMENT))
		return 0;
	return read_ports(skb, off + ip.ihl * 4, f);
}

/* The flow of the IPv6 packet at `off`; behind extension headers only the addresses. */
static __always_inline int read_flow6(struct __sk_buff *skb, __u32 off, struct flow *f, __u8 *tos)
{
	struct ipv6hdr ip;

	if (bpf_skb_load_bytes(skb, off, &ip, sizeof(ip)) || ip.version != 6)
		return -1;
	f->src = addr6(&ip.saddr);
	f->dst = addr6(&ip.daddr);
	f->proto = ip.nexthdr;
	*tos = (ip.priority << 4) | (ip.flow_lbl[0] >> 4);
	return read_ports(skb, off + sizeof(ip), f);
}
