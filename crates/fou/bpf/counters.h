// SPDX-License-Identifier: Apache-2.0
//
// Verdicts of the programs, counters of what they do, and those of each client's traffic.

#pragma once

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "layout.h"

#define PASS TC_ACT_UNSPEC /* other filters of the same hook still see the packet */

static __always_inline void add(__u32 which, __u32 more)
{
	__u64 *value = bpf_map_lookup_elem(&fou_counters, &which);

	if (value)
		*value += more;
}

static __always_inline void count(__u32 which)
{
	add(which, 1);
}

/* A packet that is yet to be segmented counts as its segments; their headers are in `bytes` once. */
static __always_inline __u32 packets(const struct __sk_buff *skb)
{
	return skb->gso_segs > 1 ? skb->gso_segs : 1;
}

static __always_inline void count_sent(const struct __sk_buff *skb, const struct addr *client, __u32 bytes)
{
	struct traffic *t = bpf_map_lookup_elem(&fou_traffic, client);

	if (t) {
		t->sent_packets += packets(skb);
		t->sent_bytes += bytes;
		add(COUNT_SENT_BYTES, bytes);
	}
}

static __always_inline void count_received(const struct __sk_buff *skb, const struct addr *client, __u32 bytes)
{
	struct traffic *t = bpf_map_lookup_elem(&fou_traffic, client);

	if (t) {
		t->received_packets += packets(skb);
		t->received_bytes += bytes;
		add(COUNT_RECEIVED_BYTES, bytes);
	}
}

static __always_inline int drop(__u32 why)
{
	count(why);
	return TC_ACT_SHOT;
}
