// SPDX-License-Identifier: Apache-2.0
//
// Foo-over-UDP with direct encapsulation (linux/fou.h, FOU_ENCAP_DIRECT) as tc classifiers, for kernels
// without the modules fou, ipip and ip6_tunnel, and the choice of an egress gateway for both kinds of tunnel.
//
// fou_egress   clsact egress of the uplink (the pod's eth0) and of every tunnel link (an ifb device).
//              On a tunnel link it encapsulates packets and sends them through the uplink. On the uplink it
//              drops packets with a foreign source address, where the settings say so, and rewrites the destination
//              of packets to a service address to a gateway of that service.
// fou_ingress  clsact ingress of the uplink. It checks FoU packets of peers, decapsulates them and redirects
//              them to the ingress of the peer's tunnel link, or leaves them to the kernel's fou.
//
// Both programs are attached to the uplink, so that the uplink's filters lead to both programs and to all of
// their maps. The helpers used here are not restricted to GPL programs (bpf_ktime_get_ns was before 5.8).
//
// Here are the programs; the headers have what they consist of, first of all the maps (layout.h).

#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "answers.h"
#include "counters.h"
#include "encapsulate.h"
#include "flow.h"
#include "gateways.h"
#include "layout.h"
#include "outer.h"

/*
 * Whether a packet on the uplink has one of the own or further addresses as its source; negative if that cannot be read. Every
 * fragment has its source, and segments share that of their packet. Unspecified sources (DHCP, duplicate address
 * detection) and link-local ones (neighbour discovery, listener reports) are no pod's, and no router forwards them.
 */
static __always_inline int has_own_source(struct __sk_buff *skb, const struct settings *c)
{
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct addr mapped = { { 0, 0, bpf_htonl(0xffff), 0 } };
		__be32 src;

		if (bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct iphdr, saddr), &src, sizeof(src)))
			return -1;
		if (!src || src == c->own[0].w[3])
			return 1;
		mapped.w[3] = src;
		return !!bpf_map_lookup_elem(&fou_sources, &mapped);
	}
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct addr src;

		if (bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, saddr), &src, sizeof(src)))
			return -1;
		return is_zero(&src) || (src.w[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000) ||
		       same(&src, &c->own[1]) || bpf_map_lookup_elem(&fou_sources, &src);
	}
	return 1;
}

/* What leaves by the uplink. This comes after nftables, so the source is the translated one. */
static __always_inline int leave(struct __sk_buff *skb, const struct settings *c)
{
	int own = c->drop_foreign ? has_own_source(skb, c) : 1;

	if (own < 0)
		return drop(COUNT_MALFORMED);
	return own ? to_gateway(skb, c->port) : drop(COUNT_FOREIGN_SOURCE);
}

SEC("classifier")
int fou_egress(struct __sk_buff *skb)
{
	__u32 zero = 0, ifindex = skb->ifindex;
	struct settings *c = bpf_map_lookup_elem(&fou_settings, &zero);
	struct link *l;

	if (!c)
		return TC_ACT_SHOT;
	if (ifindex == c->uplink)
		return leave(skb, c);
	l = bpf_map_lookup_elem(&fou_links, &ifindex);
	if (l && l->v6 && skb->protocol == bpf_htons(ETH_P_IPV6))
		return encapsulate6(skb, l, c->port, c->uplink);
	if (l && !l->v6 && skb->protocol == bpf_htons(ETH_P_IP))
		return encapsulate4(skb, l, c->port, c->uplink);
	return drop(COUNT_MALFORMED);
}

/* Checks a client's packet: its inner source must be the client, its inner destination allowed. */
static __always_inline int admit(const struct outer *o, const struct flow *f)
{
	struct prefix to = { .bits = 128, .addr = f->dst };
	__u32 *allowed;

	if (!same(&f->src, &o->src)) {
		count(COUNT_INNER_SOURCE);
		return -1;
	}
	allowed = bpf_map_lookup_elem(&fou_allowed, &to);
	if (!allowed || !*allowed) {
		count(COUNT_INNER_DESTINATION);
		return -1;
	}
	return 0;
}

/*
 * Removes the outer headers. CE of the outer header is copied to the inner one; if the inner packet is not
 * ECN-capable, the packet is dropped, as RFC 6040 (section 4.2) demands.
 */
static __always_inline int decapsulate(struct __sk_buff *skb, const struct outer *o, __u32 ifindex, __u8 inner_tos)
{
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;
	__s32 n = o->inner - ETH_HLEN;

	if ((o->tos & 3) == 3 && !(inner_tos & 3))
		return drop(COUNT_MALFORMED);
	if (bpf_skb_adjust_room(skb, -n, BPF_ADJ_ROOM_MAC, flags))
		return drop(COUNT_FAILED);
	if ((o->tos & 3) == 3)
		bpf_skb_ecn_set_ce(skb);
	count(COUNT_DECAPSULATED);
	return bpf_redirect(ifindex, BPF_F_INGRESS);
}

SEC("classifier")
int fou_ingress(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct settings *c = bpf_map_lookup_elem(&fou_settings, &zero);
	struct outer o = {};
	struct flow f = {};
	struct peer *p;
	__u8 tos = 0;
	int kind;

	if (!c)
		return PASS;
	kind = read_outer(skb, c->port, &o);
	if (kind == OTHER)
		return PASS;
	p = bpf_map_lookup_elem(&fou_peers, &o.src);
	if (!p) {
		count(COUNT_UNKNOWN_SENDER);
		return c->drop_unknown ? TC_ACT_SHOT : PASS;
	}
	if (kind == FOU_FRAGMENT && p->ifindex)
		return drop(COUNT_FRAGMENT);
	if (kind == FOU_FRAGMENT)
		return PASS;
	if (kind != FOU || read_inner(skb, &o, &f, &tos))
		return drop(COUNT_MALFORMED);
	if (p->role == ROLE_CLIENT) {
		if (admit(&o, &f))
			return TC_ACT_SHOT;
		count_sent(skb, &f.src, skb->len - o.inner);
	}
	if (p->role == ROLE_GATEWAY && admit_answer(skb, &o, &f, p))
		return TC_ACT_SHOT;
	if (p->ifindex)
		return decapsulate(skb, &o, p->ifindex, tos);
	if (p->role == ROLE_GATEWAY && replace_addr(skb, &o, 0, &o.src, &p->service))
		return drop(COUNT_FAILED);
	return PASS;
}

char _license[] SEC("license") = "Apache-2.0";
