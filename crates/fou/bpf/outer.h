// SPDX-License-Identifier: Apache-2.0
//
// Outer headers of a packet that arrives: reading them, and replacing an address in them.

#pragma once

#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "flow.h"
#include "layout.h"

#define IP_OFFSET 0x1fff /* fragment offset */
#define IP6_OFFSET 0xfff8 /* fragment offset, RFC 8200 section 4.5 */
#define DSTOPT_LEN 8 /* the tunnel encapsulation limit option, RFC 2473 section 4.1.1 */

/* What the outer headers of a FoU packet say. */
struct outer {
	struct addr src;
	struct addr dst;
	__u32 udp; /* offset of the UDP header */
	__u32 inner; /* offset of the inner packet */
	__u32 v6;
	__u8 tos;
};

/* What read_outer found. Later fragments have no port and are another packet. */
enum kind { FOU, FOU_CUT_SHORT, FOU_FRAGMENT, OTHER };

static __always_inline int read_outer4(struct __sk_buff *skb, __be16 port, struct outer *o)
{
	struct udphdr udp;
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5 ||
	    ip.protocol != IPPROTO_UDP || (ip.frag_off & bpf_htons(IP_OFFSET)))
		return OTHER;
	o->udp = ETH_HLEN + ip.ihl * 4;
	if (bpf_skb_load_bytes(skb, o->udp, &udp, sizeof(udp)) || udp.dest != port)
		return OTHER;
	o->src = addr4(ip.saddr);
	o->dst = addr4(ip.daddr);
	o->tos = ip.tos;
	o->v6 = 0;
	o->inner = o->udp + sizeof(udp);
	return ip.frag_off & bpf_htons(IP_FRAGMENT) ? FOU_FRAGMENT : FOU;
}

/*
 * The encapsulation limit, a destination option of 8 bytes (RFC 2473, section 4.1.1). The kernel's ip6tnl puts it
 * in front of the inner packet, behind UDP; it is also accepted in front of UDP.
 */
static __always_inline int skip_option(struct __sk_buff *skb, __u32 *off, __u8 next)
{
	__u8 option[2];

	if (bpf_skb_load_bytes(skb, *off, option, sizeof(option)) || option[0] != next || option[1])
		return -1;
	*off += DSTOPT_LEN;
	return 0;
}

/* The first fragment of a FoU packet, whose fragment header is at `off`. */
static __always_inline int is_fragment6(struct __sk_buff *skb, __u32 off, __be16 port)
{
	struct {
		__u8 next;
		__u8 reserved;
		__be16 offset;
		__be32 id;
		struct udphdr udp;
	} h;

	return !bpf_skb_load_bytes(skb, off, &h, sizeof(h)) && h.next == IPPROTO_UDP &&
	       !(h.offset & bpf_htons(IP6_OFFSET)) && h.udp.dest == port;
}

static __always_inline int read_outer6(struct __sk_buff *skb, __be16 port, struct outer *o)
{
	struct udphdr udp;
	struct ipv6hdr ip;
	__u8 first;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 6)
		return OTHER;
	o->src = addr6(&ip.saddr);
	o->dst = addr6(&ip.daddr);
	o->tos = (ip.priority << 4) | (ip.flow_lbl[0] >> 4);
	o->v6 = 1;
	o->udp = ETH_HLEN + sizeof(ip);
	if (ip.nexthdr == IPPROTO_FRAGMENT)
		return is_fragment6(skb, o->udp, port) ? FOU_FRAGMENT : OTHER;
	if (ip.nexthdr == IPPROTO_DSTOPTS ? skip_option(skb, &o->udp, IPPROTO_UDP) : ip.nexthdr != IPPROTO_UDP)
		return OTHER;
	if (bpf_skb_load_bytes(skb, o->udp, &udp, sizeof(udp)) || udp.dest != port)
		return OTHER;
	o->inner = o->udp + sizeof(udp);
	if (bpf_skb_load_bytes(skb, o->inner, &first, sizeof(first)))
		return FOU_CUT_SHORT;
	return first >> 4 == 6 || !skip_option(skb, &o->inner, IPPROTO_IPV6) ? FOU : FOU_CUT_SHORT;
}

static __always_inline int read_outer(struct __sk_buff *skb, __be16 port, struct outer *o)
{
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return read_outer4(skb, port, o);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return read_outer6(skb, port, o);
	return OTHER;
}

static __always_inline int read_inner(struct __sk_buff *skb, const struct outer *o, struct flow *f, __u8 *tos)
{
	return o->v6 ? read_flow6(skb, o->inner, f, tos) : read_flow4(skb, o->inner, f, tos);
}

/*
 * Replaces an outer address and updates the checksums that cover it. BPF_F_MARK_MANGLED_0 leaves a UDP checksum
 * of zero unchanged. In IPv4 the changes of address and header checksum cancel out in skb->csum, so the address is
 * stored without BPF_F_RECOMPUTE_CSUM; IPv6 has no header checksum and needs it.
 */
static __always_inline int replace_addr(struct __sk_buff *skb, const struct outer *o, int dst, const struct addr *from,
					const struct addr *to)
{
	__u64 flags = BPF_F_PSEUDO_HDR | BPF_F_MARK_MANGLED_0;
	__u32 check = o->udp + offsetof(struct udphdr, check);

	if (o->v6) {
		__u32 at = ETH_HLEN + (dst ? offsetof(struct ipv6hdr, daddr) : offsetof(struct ipv6hdr, saddr));
		__s64 diff = bpf_csum_diff((__be32 *)from->w, sizeof(*from), (__be32 *)to->w, sizeof(*to), 0);

		return bpf_l4_csum_replace(skb, check, 0, diff, flags) ||
		       bpf_skb_store_bytes(skb, at, to, sizeof(*to), BPF_F_RECOMPUTE_CSUM);
	}
	return bpf_l4_csum_replace(skb, check, from->w[3], to->w[3], flags | 4) ||
	       bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), from->w[3], to->w[3], 4) ||
	       bpf_skb_store_bytes(skb,
				   ETH_HLEN + (dst ? offsetof(struct iphdr, daddr) : offsetof(struct iphdr, saddr)),
				   &to->w[3], sizeof(to->w[3]), 0);
}
