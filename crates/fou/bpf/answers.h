// SPDX-License-Identifier: Apache-2.0
//
// Packets that gateways send to a client: from where the client sends through them.

#pragma once

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "flow.h"
#include "layout.h"
#include "outer.h"

#define ICMP_HEADER 8 /* of errors: RFC 792, RFC 4443 section 3 */

/* The service by whose tunnel packets to this address leave. */
static __always_inline const struct addr *service_of(const struct addr *a)
{
	struct prefix of = { .bits = 128, .addr = *a };

	return bpf_map_lookup_elem(&fou_origins, &of);
}

/* Destination unreachable, time exceeded, parameter problem; of IPv6 all errors (RFC 4443, section 2.1). */
static __always_inline int is_error_type(__u8 type, __u32 v6)
{
	if (v6)
		return type < 128;
	return type == 3 || type == 11 || type == 12;
}

/*
 * Whether a gateway's packet is ICMP that need not come from a destination. Gateways lead all of their own ICMP into tunnels, which they
 * could send outside of them as well. An error about a packet that went through the tunnel to the service may have any source: each router
 * on the way sends such, with an address of its own.
 */
static __always_inline int is_own_or_error(struct __sk_buff *skb, const struct outer *o, const struct flow *f,
					   const struct peer *p)
{
	__u32 icmp = o->v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP;
	__u32 at = o->inner + sizeof(struct ipv6hdr);
	const struct addr *service;
	struct flow quoted = {};
	__u8 type, tos;

	if (f->proto != icmp)
		return 0;
	if (same(&f->src, &o->src))
		return 1;
	if (!o->v6) {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, o->inner, &ip, sizeof(ip)) || (ip.frag_off & bpf_htons(IP_OFFSET)))
			return 0;
		at = o->inner + ip.ihl * 4;
	}
	if (bpf_skb_load_bytes(skb, at, &type, sizeof(type)) || !is_error_type(type, o->v6))
		return 0;
	at += ICMP_HEADER;
	if (o->v6 ? read_flow6(skb, at, &quoted, &tos) : read_flow4(skb, at, &quoted, &tos))
		return 0;
	service = service_of(&quoted.dst);
	return service && same(service, &p->service) && same(&quoted.src, &f->dst);
}

/*
 * Checks a gateway's packet: it must be to the pod, whose address the outer destination is, and from where the pod sends through the
 * tunnel to the gateway's service.
 */
static __always_inline int admit_answer(struct __sk_buff *skb, const struct outer *o, const struct flow *f,
					const struct peer *p)
{
	const struct addr *service = service_of(&f->src);

	if (!service)
		return 0;
	if (!same(&f->dst, &o->dst)) {
		count(COUNT_INNER_DESTINATION);
		return -1;
	}
	if (!same(service, &p->service) && !is_own_or_error(skb, o, f, p)) {
		count(COUNT_INNER_SOURCE);
		return -1;
	}
	return 0;
}
