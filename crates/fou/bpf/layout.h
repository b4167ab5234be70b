// SPDX-License-Identifier: Apache-2.0
//
// Structures and maps. The layout of every map is repeated in src/layout.rs, the counters in src/counters.rs. All structures are
// free of padding.

#pragma once

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#define MAX_GATEWAYS 32

/* An address in network byte order; IPv4 as ::ffff:a.b.c.d, so that one map serves both families. */
struct addr {
	__u32 w[4];
};

struct settings {
	__u64 version; /* of this program; the first 8 bytes in every version */
	__u32 uplink; /* interface index of eth0 */
	__be16 port; /* UDP port of FoU */
	__u8 drop_unknown; /* not 0: FoU packets of unknown senders are dropped (a gateway) */
	__u8 drop_foreign; /* not 0: packets leave the uplink only with these source addresses (a gateway) */
	struct addr own[2]; /* IPv4, IPv6; all zero: there is none */
};

/* A tunnel link, by interface index. */
struct link {
	struct addr local; /* outer source */
	struct addr remote; /* outer destination; all zero: the inner destination */
	__be16 sport; /* outer source port; 0: by the inner flow */
	__u16 v6; /* not 0: IPv6 in IPv6 */
};

enum role { ROLE_GATEWAY = 1, ROLE_CLIENT = 2 };

/* A host whose FoU packets are accepted, by outer source address. */
struct peer {
	__u32 ifindex; /* tunnel link on which its packets arrive; 0: the kernel's fou decapsulates */
	__u32 role;
	struct addr service; /* ROLE_GATEWAY: the service; with ifindex 0 also the outer source that the kernel's link expects */
};

enum gateway_state { GATEWAY_LIVE = 1, GATEWAY_DRAINING = 2 };

struct gateway {
	struct addr addr;
	__u32 state; /* draining: keeps its flows and gets no new ones */
};

/* The gateways of a service address. One value, so that an update replaces the whole set at once. */
struct service {
	__u64 idle_ns; /* a flow without a packet for this long gets a new choice; 0: never */
	__u32 count;
	__u32 by_client; /* not 0: all flows of one client go to the same gateway */
	struct gateway gateways[MAX_GATEWAYS];
};

struct flow {
	struct addr service;
	struct addr src;
	struct addr dst;
	__be16 sport;
	__be16 dport;
	__u32 proto;
};

struct choice {
	struct addr gateway;
	__u64 used_ns;
};

struct prefix {
	__u32 bits; /* 96 more than the IPv4 prefix length */
	struct addr addr;
};

enum counter {
	COUNT_ENCAPSULATED,
	COUNT_DECAPSULATED,
	COUNT_UNKNOWN_SENDER,
	COUNT_INNER_SOURCE,
	COUNT_INNER_DESTINATION,
	COUNT_MALFORMED,
	COUNT_FRAGMENT, /* fragments of FoU packets: they are not reassembled before decapsulation */
	COUNT_NO_GATEWAY,
	COUNT_FAILED, /* a kernel helper failed */
	COUNT_CHOSEN, /* flows, or clients, for which a gateway was chosen */
	COUNT_FOREIGN_SOURCE,
	COUNT_SENT_BYTES, /* by clients, from the inner IP header on */
	COUNT_RECEIVED_BYTES,
	COUNTERS,
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct settings);
} fou_settings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct link);
} fou_links SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, struct peer);
} fou_peers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, struct service);
} fou_services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct flow);
	__type(value, struct choice);
} fou_flows SEC(".maps");

/* Inner destinations of clients: value 1 allows, 0 forbids; the longest prefix decides; no prefix forbids. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix);
	__type(value, __u32);
} fou_allowed SEC(".maps");

/*
 * Inner sources of what gateways send: the longest prefix has the service by whose tunnel packets to it leave; all zero: by none. Without
 * any prefix, packets of gateways are not checked. There is room for several Egresses with as many destinations as a gateway takes, and
 * for those before and after a change.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix);
	__type(value, struct addr);
} fou_origins SEC(".maps");

/* What was exchanged with a client: packets as they are on the wire, and their bytes from the inner IP header on. */
struct traffic {
	__u64 sent_packets; /* by the client */
	__u64 sent_bytes;
	__u64 received_packets;
	__u64 received_bytes;
};

/* By the address of the client; only those that have an entry are counted. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, struct traffic);
} fou_traffic SEC(".maps");

/* Further source addresses with which packets may leave the uplink; the values mean nothing. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, __u32);
} fou_sources SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} fou_counters SEC(".maps");
