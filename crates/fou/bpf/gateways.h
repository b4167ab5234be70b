// SPDX-License-Identifier: Apache-2.0
//
// The gateway of a flow to a service address.

#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "flow.h"
#include "layout.h"
#include "outer.h"

/* Loops over gateways are unrolled: with a variable index into a map value the verifier demands CAP_PERFMON. */
#define UNROLLED _Pragma("clang loop unroll(full)")

/* Whether a gateway is in a service, live or, if that is enough, draining. */
static __always_inline int is_in(const struct service *s, const struct addr *gateway, int draining_is_enough)
{
	UNROLLED
	for (__u32 i = 0; i < MAX_GATEWAYS; i++) {
		__u32 state;

		if (i >= s->count)
			break;
		state = s->gateways[i].state;
		if (state && (draining_is_enough || state == GATEWAY_LIVE) && same(&s->gateways[i].addr, gateway))
			return 1;
	}
	return 0;
}

/* Rendezvous hashing: when a gateway is removed, only its own flows move. */
static __always_inline int rendezvous(const struct service *s, const struct flow *f, struct addr *best)
{
	__u32 seed = hash_flow(f), top = 0;
	int found = 0;

	UNROLLED
	for (__u32 i = 0; i < MAX_GATEWAYS; i++) {
		__u32 score;

		if (i >= s->count)
			break;
		if (s->gateways[i].state != GATEWAY_LIVE)
			continue;
		score = mix_addr(seed, &s->gateways[i].addr);
		if (!found || score > top) {
			*best = s->gateways[i].addr;
			top = score;
			found = 1;
		}
	}
	return found;
}

/* Whether a choice has been used within the idle time. */
static __always_inline int is_recent(const struct service *s, const struct choice *c, __u64 now)
{
	return !s->idle_ns || now - c->used_ns < s->idle_ns;
}

/*
 * The gateway of this flow. A flow keeps the one it has, also while that is draining. A new flow goes to a live one: if all flows of
 * a client go to the same gateway, to that of the client, which has an entry with no more than its address. Returns 0 if there is
 * none.
 */
static __always_inline int choose(const struct service *s, const struct flow *f, struct addr *gateway)
{
	struct flow chooser = *f;
	struct choice *of_flow = bpf_map_lookup_elem(&fou_flows, f), *of_client = 0;
	struct choice new = { .used_ns = bpf_ktime_get_ns() };

	if (s->by_client) {
		__builtin_memset(&chooser.dst, 0, sizeof(chooser.dst));
		chooser.sport = 0;
		chooser.dport = 0;
		chooser.proto = 0;
		of_client = bpf_map_lookup_elem(&fou_flows, &chooser);
	}
	if (of_flow && is_recent(s, of_flow, new.used_ns) && is_in(s, &of_flow->gateway, 1)) {
		of_flow->used_ns = new.used_ns;
		*gateway = of_flow->gateway;
		if (of_client && same(&of_client->gateway, gateway))
			of_client->used_ns = new.used_ns;
		return 1;
	}
	if (of_client && is_recent(s, of_client, new.used_ns) && is_in(s, &of_client->gateway, 0)) {
		of_client->used_ns = new.used_ns;
		new.gateway = of_client->gateway;
	} else {
		if (!rendezvous(s, &chooser, &new.gateway))
			return 0;
		if (s->by_client)
			bpf_map_update_elem(&fou_flows, &chooser, &new, BPF_ANY);
		count(COUNT_CHOSEN);
	}
	bpf_map_update_elem(&fou_flows, f, &new, BPF_ANY);
	*gateway = new.gateway;
	return 1;
}

static __always_inline int to_gateway(struct __sk_buff *skb, __be16 port)
{
	struct outer o = {};
	struct flow f = {};
	struct addr gateway;
	struct service *s;
	__u8 tos;
	int kind;

	kind = read_outer(skb, port, &o);
	if (kind == OTHER)
		return PASS;
	s = bpf_map_lookup_elem(&fou_services, &o.dst);
	if (!s)
		return PASS;
	if (kind == FOU_FRAGMENT)
		return drop(COUNT_FRAGMENT);
	if (kind != FOU || read_inner(skb, &o, &f, &tos))
		return drop(COUNT_MALFORMED);
	f.service = o.dst;
	if (!choose(s, &f, &gateway))
		return drop(COUNT_NO_GATEWAY);
	if (replace_addr(skb, &o, 1, &o.dst, &gateway))
		return drop(COUNT_FAILED);
	return PASS;
}
