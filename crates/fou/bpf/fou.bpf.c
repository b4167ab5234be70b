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
// The layout of every map is repeated in src/layout.rs. All structures are free of padding.

#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* Loops over gateways are unrolled: with a variable index into a map value the verifier demands CAP_PERFMON. */
#define MAX_GATEWAYS 32
#define UNROLLED _Pragma("clang loop unroll(full)")
#define OUTER_TTL 225
#define AUTO_PORT_BASE 49152 /* RFC 6335 dynamic ports: 2^14 of them */
#define AUTO_PORT_SHIFT 18
#define IP_FRAGMENT 0x3fff /* more-fragments flag and fragment offset */
#define IP_OFFSET 0x1fff /* fragment offset */
#define IP6_OFFSET 0xfff8 /* fragment offset, RFC 8200 section 4.5 */
#define DSTOPT_LEN 8 /* the tunnel encapsulation limit option, RFC 2473 section 4.1.1 */
#define PASS TC_ACT_UNSPEC /* other filters of the same hook still see the packet */

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
	struct addr service; /* ROLE_GATEWAY with ifindex 0: the outer source that the kernel's link expects */
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
	if (p->ifindex)
		return decapsulate(skb, &o, p->ifindex, tos);
	if (p->role == ROLE_GATEWAY && replace_addr(skb, &o, 0, &o.src, &p->service))
		return drop(COUNT_FAILED);
	return PASS;
}

char _license[] SEC("license") = "Apache-2.0";
