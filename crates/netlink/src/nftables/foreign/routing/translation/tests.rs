use std::collections::BTreeMap;
use std::rc::Rc;

use proptest::prelude::*;

use super::packet::Sets;
use super::steps::{Field, Step};
use super::*;
use crate::nftables::attributes::AttributeWriter;
use crate::nftables::foreign::TableFamily;
use crate::nftables::foreign::routing::Bounded;
use crate::nftables::{AddressEnd, Comparison, Expression, Header, Meta};

const PORT: u16 = 51820;
const NODE: &str = "192.0.2.1";
/// `NFPROTO_IPV4`, `NFPROTO_IPV6`
const IPV4: u32 = 2;
const IPV6: u32 = 10;

/// Expressions as the kernel shows them.
type Bytes = Vec<u8>;

fn written(write: impl FnOnce(&mut AttributeWriter)) -> Bytes {
    let mut list = AttributeWriter::new(&[]);
    write(&mut list);
    list.finish("test").unwrap()
}

fn of(expressions: &[Expression]) -> Bytes {
    written(|list| expressions.iter().for_each(|expression| expression.write(list)))
}

/// An expression that this crate does not write.
fn expression(name: &str, data: impl FnOnce(&mut AttributeWriter)) -> Bytes {
    written(|list| {
        list.nested(1, |element| {
            element.text(1, name);
            element.nested(2, data);
        });
    })
}

fn protocol(number: u8) -> Bytes {
    of(&[Expression::LoadMeta(Meta::TransportProtocol), Expression::Compare(Comparison::Equal, vec![number])])
}

const LOAD_PORT: Expression = Expression::LoadPayload { header: Header::Transport, offset: 2, length: 2 };

fn port(comparison: Comparison, port: u16) -> Bytes {
    of(&[LOAD_PORT, Expression::Compare(comparison, port.to_be_bytes().to_vec())])
}

/// `udp dport 51820`
fn wireguards() -> Bytes {
    [protocol(17), port(Comparison::Equal, PORT)].concat()
}

fn from(link: &str) -> Bytes {
    of(&[Expression::LoadMeta(Meta::InputInterface), Expression::is_interface(link)])
}

fn source(address: &str) -> Bytes {
    of(&Expression::address_is(AddressEnd::Source, address.parse().unwrap()))
}

fn destination(address: &str) -> Bytes {
    of(&Expression::address_is(AddressEnd::Destination, address.parse().unwrap()))
}

/// `dnat ip to 10.5.0.9:PORT`
fn dnat((address, family): (&str, u32), port: u16) -> Bytes {
    let address = fairlead_address::octets(address.parse().unwrap());
    let constant = |register: u32, bytes: &[u8]| {
        expression("immediate", |data| {
            data.be32(1, register);
            data.nested(2, |value| value.bytes(1, bytes));
        })
    };
    let registers = [(1, 1), (2, family), (3, 1), (4, 1), (5, 2), (6, 2)];
    let nat = expression("nat", |data| data.be32s(&registers));
    [constant(1, &address), constant(2, &port.to_be_bytes()), nat].concat()
}

fn to_pod() -> Bytes {
    dnat(("10.5.0.9", IPV4), PORT)
}

/// `redirect to :PORT`
fn redirect(port: u16) -> Bytes {
    let to = expression("redir", |data| data.be32s(&[(1, 1), (2, 1)]));
    [of(&[Expression::LoadConstant(port.to_be_bytes().to_vec())]), to].concat()
}

/// `NFT_JUMP`, `NFT_GOTO`, `NFT_RETURN`
const JUMP: i32 = -3;
const GOTO: i32 = -4;
const RETURN: i32 = -5;

fn verdict(code: i32, to: &str) -> Bytes {
    expression("immediate", |data| {
        data.be32(1, 0);
        data.nested(2, |value| {
            value.nested(2, |verdict| {
                verdict.be32(1, code as u32);
                verdict.text(2, to);
            });
        });
    })
}

/// `meta l4proto . th dport`
fn protocol_and_port() -> Bytes {
    let behind = expression("payload", |data| data.be32s(&[(1, 9), (2, 2), (3, 2), (4, 2)]));
    [of(&[Expression::LoadMeta(Meta::TransportProtocol)]), behind].concat()
}

/// A condition on a set, or a map whose values go to a register.
fn lookup(set: &str, result: Option<u32>) -> Bytes {
    expression("lookup", |data| {
        data.text(1, set);
        data.be32(2, 1);
        if let Some(register) = result {
            data.be32(3, register);
        }
    })
}

/// An extension of iptables: name, revision and what it has.
fn extension(kind: &str, (name, revision): (&str, u32), info: &[u8]) -> Bytes {
    expression(kind, |data| {
        data.text(1, name);
        data.be32(2, revision);
        data.bytes(3, info);
    })
}

/// `--dst-type LOCAL`, or `! --dst-type LOCAL`.
fn local_destination(is_inverted: bool) -> Bytes {
    extension("match", ("addrtype", 1), &[0, 0, 4, 0, if is_inverted { 2 } else { 0 }, 0, 0, 0])
}

/// `-m multiport --dports 5,FIRST:LAST`
fn multiport(first: u16, last: u16) -> Bytes {
    let mut info = [0; 48];
    info[..2].copy_from_slice(&[1, 3]);
    for (index, port) in [5, first, last].into_iter().enumerate() {
        info[2 + 2 * index..4 + 2 * index].copy_from_slice(&port.to_ne_bytes());
    }
    info[33] = 1;
    extension("match", ("multiport", 1), &info)
}

/// `-j DNAT --to-destination 10.5.0.9:PORT`, as iptables 1.8.9 writes it.
fn dnat_target(port: u16) -> Bytes {
    let mut info = [0; 48];
    info[0] = 3;
    for at in [4, 20] {
        info[at..at + 4].copy_from_slice(&[10, 5, 0, 9]);
    }
    for at in [36, 38] {
        info[at..at + 2].copy_from_slice(&port.to_be_bytes());
    }
    extension("target", ("DNAT", 2), &info)
}

/// `-j REDIRECT --to-ports PORT` of IPv4.
fn redirect_target(port: u16) -> Bytes {
    let mut info = [0; 24];
    (info[0], info[4]) = (1, 2);
    for at in [16, 18] {
        info[at..at + 2].copy_from_slice(&port.to_be_bytes());
    }
    extension("target", ("REDIRECT", 0), &info)
}

/// Key and verdict.
type SetElement = (Vec<u8>, Verdict);

/// Tables of another program; chains of all tables have different names.
#[derive(Default)]
struct Tables {
    chains: BTreeMap<&'static str, Rc<Bounded<NatRule>>>,
    /// Length of the keys, and elements.
    sets: BTreeMap<&'static str, (usize, Vec<SetElement>)>,
}

impl Tables {
    /// Adds a chain, whose rules have the handles 1, 2 and so on.
    fn with(self, chain: &'static str, rules: &[Bytes]) -> Self {
        self.with_first(usize::MAX, chain, rules)
    }

    /// Adds a chain of which at most so many rules are kept.
    fn with_first(mut self, most: usize, chain: &'static str, rules: &[Bytes]) -> Self {
        let mut parsed = Bounded::new(most);
        for (handle, rule) in (1..).zip(rules) {
            parsed.add(|| steps::parse(rule, handle).map(Some)).unwrap();
        }
        self.chains.insert(chain, Rc::new(parsed));
        self
    }

    fn with_set(mut self, set: &'static str, length: usize, elements: Vec<SetElement>) -> Self {
        self.sets.insert(set, (length, elements));
        self
    }
}

impl Source for Tables {
    fn enter(&mut self, _: &RoutingChain) {}

    fn rules(&mut self, chain: &str) -> Result<Rc<Bounded<NatRule>>> {
        Ok(self.chains.get(chain).cloned().unwrap_or_default())
    }
}

impl Sets for Tables {
    fn key_length(&mut self, set: &str) -> Result<Option<usize>> {
        Ok(self.sets.get(set).map(|(length, _)| *length))
    }

    fn element(&mut self, set: &str, key: &[u8]) -> Result<Option<Verdict>> {
        let (length, elements) = &self.sets[set];
        assert_eq!(key.len(), *length, "the kernel refuses it");
        Ok(elements.iter().find(|(of, _)| of == key).map(|(_, verdict)| verdict.clone()))
    }

    fn verdicts(&mut self, set: &str) -> Result<Vec<Verdict>> {
        Ok(self.sets[set].1.iter().map(|(_, verdict)| verdict.clone()).collect())
    }
}

fn base(name: &str, family: TableFamily) -> RoutingChain {
    let (table, name) = ("nat".to_owned(), name.to_owned());
    let hook = RoutingHook::Prerouting;
    RoutingChain { family, table, name, hook, priority: -100, reroutes: false }
}

fn arrival(destination: &str) -> Arrival {
    let input = "eth0".to_owned();
    Arrival { link: 2, input, destination: destination.parse().unwrap(), port: PORT }
}

/// Chains and handles of the rules that a packet to this node meets, from the base chains on.
fn met(arrival: &Arrival, mut tables: Tables, bases: &[&str]) -> Vec<(String, u64)> {
    let chains: Vec<RoutingChain> = bases.iter().map(|name| base(name, TableFamily::Inet)).collect();
    let own: [IpAddr; 2] = [NODE.parse().unwrap(), "2001:db8::1".parse().unwrap()];
    let found = follow(Packet { arrival, own: &own }, &chains, &mut tables).unwrap();
    found.into_iter().map(|rule| (rule.chain, rule.handle)).collect()
}

fn found(tables: Tables) -> Vec<(String, u64)> {
    met(&arrival(NODE), tables, &["PREROUTING"])
}

/// Whether a rule in a base chain is found.
fn is_found(parts: &[Bytes]) -> bool {
    let count = found(Tables::default().with("PREROUTING", &[parts.concat()])).len();
    assert!(count <= 1);
    count == 1
}

fn at(chain: &str, handle: u64) -> Vec<(String, u64)> {
    vec![(chain.to_owned(), handle)]
}

#[test]
fn a_rule_that_gives_wireguards_port_to_another_program_is_found() {
    for rule in [
        vec![wireguards(), to_pod()],
        vec![wireguards(), redirect(5000)],
        vec![destination(NODE), wireguards(), to_pod()],
        vec![of(&Expression::destination_is_local()), wireguards(), to_pod()],
        vec![from("eth0"), wireguards(), to_pod()],
        vec![protocol(17), port(Comparison::AtLeast, 51000), port(Comparison::AtMost, 52000), to_pod()],
        vec![protocol(17), port(Comparison::NotEqual, 53), to_pod()],
        // From some nodes, it may be.
        vec![source("198.51.100.9"), wireguards(), to_pod()],
        vec![of(&Expression::mark_is(1, 1)), wireguards(), to_pod()],
        // All that comes, whatever its port is.
        vec![from("eth0"), to_pod()],
        vec![wireguards(), extension("target", ("NETMAP", 0), &[])],
    ] {
        assert!(is_found(&rule), "{rule:?}");
    }
}

#[test]
fn a_rule_for_other_packets_is_not() {
    for rule in [
        vec![protocol(6), port(Comparison::Equal, PORT), to_pod()],
        vec![protocol(17), port(Comparison::Equal, 53), to_pod()],
        vec![protocol(17), port(Comparison::AtLeast, 51821), to_pod()],
        vec![destination("192.0.2.2"), wireguards(), to_pod()],
        vec![from("docker0"), wireguards(), to_pod()],
        vec![wireguards(), dnat(("fd00::9", IPV6), PORT)],
        // Of whatever these sources send, nothing may come from a node's WireGuard.
        vec![source("198.51.100.9"), to_pod()],
        vec![wireguards(), of(&[Expression::Counter, Expression::Accept])],
        vec![wireguards(), extension("target", ("MARK", 2), &[])],
        // It gets the same port of this host: such a rule is for other ports.
        vec![protocol(17), port(Comparison::AtLeast, 51000), redirect(PORT)],
        vec![wireguards(), expression("redir", |_| {})],
        vec![wireguards(), redirect_target(PORT)],
        vec![wireguards(), dnat((NODE, IPV4), PORT)],
    ] {
        assert!(!is_found(&rule), "{rule:?}");
    }
    assert!(is_found(&[wireguards(), dnat((NODE, IPV4), 5000)]));
    assert!(is_found(&[wireguards(), redirect_target(5000)]));
}

#[test]
fn addresses_of_ipv6_are_followed_in_tables_for_them() {
    let rules = || {
        let to_pod = dnat(("fd00::9", IPV6), PORT);
        Tables::default().with("PREROUTING", &[[wireguards(), to_pod].concat()])
    };
    let v6 = arrival("2001:db8::1");
    assert_eq!(met(&v6, rules(), &["PREROUTING"]), at("PREROUTING", 1));
    assert_eq!(met(&arrival(NODE), rules(), &["PREROUTING"]), []);
    let own = [v6.destination];
    let of_ipv4 = [base("PREROUTING", TableFamily::Ipv4)];
    assert_eq!(follow(Packet { arrival: &v6, own: &own }, &of_ipv4, &mut rules()).unwrap(), []);
}

/// The CNI plugin `portmap` 1.1.1, with iptables 1.8.9.
#[test]
fn a_host_port_of_portmap_is_found_behind_its_jumps() {
    let tables = |conditions: Bytes, ports: Bytes| {
        let into = |to: &str| verdict(JUMP, to);
        let to_mark = [source("10.5.0.0"), wireguards(), into("CNI-HOSTPORT-SETMARK")].concat();
        Tables::default()
            .with("PREROUTING", &[[conditions, into("CNI-HOSTPORT-DNAT")].concat()])
            .with("CNI-HOSTPORT-DNAT", &[[protocol(17), ports, into("CNI-DN-1")].concat()])
            .with("CNI-DN-1", &[to_mark, [wireguards(), dnat_target(PORT)].concat()])
            .with("CNI-HOSTPORT-SETMARK", &[extension("target", ("MARK", 2), &[0, 0x20, 0, 0])])
    };
    assert_eq!(found(tables(local_destination(false), multiport(PORT, PORT))), at("CNI-DN-1", 2));
    assert_eq!(found(tables(local_destination(true), multiport(PORT, PORT))), []);
    assert_eq!(found(tables(local_destination(false), multiport(51000, 51819))), []);
    let unknown = extension("match", ("set", 4), &[]);
    assert_eq!(found(tables(unknown, multiport(51000, 52000))), at("CNI-DN-1", 2), "the port is named");
}

/// kube-proxy in its mode nftables, whose maps lead to a chain for each Service, and from there to one for each endpoint.
#[test]
fn node_ports_and_maps_of_host_ports_are_found_by_the_packets_element() {
    let key = |port: u16| [&[17, 0, 0, 0][..], &port.to_be_bytes(), &[0, 0]].concat();
    let goto = |to: &str| Verdict::Goto(to.to_owned());
    let tables = |node_port: u16| {
        let is_node_port = [destination(NODE), protocol_and_port(), lookup("ports", Some(0))].concat();
        let random = expression("numgen", |data| data.be32s(&[(1, 1), (2, 2)]));
        let endpoint = [random, lookup("random", Some(0))].concat();
        Tables::default()
            .with("PREROUTING", &[is_node_port])
            .with("external", &[verdict(GOTO, "service")])
            .with("service", &[endpoint])
            .with("endpoint", &[[protocol(17), to_pod()].concat()])
            .with_set("ports", 8, vec![(key(53), goto("other")), (key(node_port), goto("external"))])
            .with_set("random", 4, vec![(vec![0; 4], goto("endpoint"))])
    };
    assert_eq!(found(tables(PORT)), at("endpoint", 1));
    assert_eq!(found(tables(30000)), []);
    // CRI-O: `dnat to meta l4proto . th dport map @hostports`
    let mapped = |host_port: u16| {
        let nat = expression("nat", |data| data.be32s(&[(1, 1), (2, IPV4), (3, 1), (4, 1), (5, 9), (6, 9)]));
        let rule = [protocol_and_port(), lookup("hosts", Some(1)), nat].concat();
        let elements = vec![(key(host_port), Verdict::None)];
        Tables::default().with("PREROUTING", &[rule]).with_set("hosts", 8, elements)
    };
    assert_eq!(found(mapped(PORT)), at("PREROUTING", 1));
    assert_eq!(found(mapped(53)), []);
    // `udp dport { PORT }`
    let among = |port: u16| {
        let rule = [protocol(17), of(&[LOAD_PORT]), lookup("some", None), to_pod()].concat();
        let elements = vec![(port.to_be_bytes().to_vec(), Verdict::None)];
        Tables::default().with("PREROUTING", &[rule]).with_set("some", 2, elements)
    };
    assert_eq!(found(among(PORT)), at("PREROUTING", 1));
    assert_eq!(found(among(53)), []);
}

#[test]
fn an_exception_counts_for_what_follows_it() {
    let accept = of(&[Expression::Accept]);
    let taken = [wireguards(), to_pod()].concat();
    let behind = |exception: Bytes| {
        let jump = verdict(JUMP, "inner");
        Tables::default()
            .with("PREROUTING", &[jump, taken.clone()])
            .with("inner", &[exception])
            .with("SECOND", std::slice::from_ref(&taken))
    };
    let both = |exception| met(&arrival(NODE), behind(exception), &["PREROUTING", "SECOND"]);
    let second = at("SECOND", 1);
    assert_eq!(both([wireguards(), accept.clone()].concat()), second, "it counts in its base chain alone");
    assert_eq!(both([wireguards(), of(&[Expression::Drop])].concat()), []);
    assert_eq!(both([wireguards(), redirect(PORT)].concat()), second);
    assert_eq!(both([wireguards(), verdict(RETURN, "")].concat()), at("PREROUTING", 2));
    // Other nodes are not excepted; of two translations the first one counts.
    assert_eq!(both([source("198.51.100.9"), accept].concat()), at("PREROUTING", 2));
    assert_eq!(both([wireguards(), redirect(5000)].concat()), at("inner", 1));
}

#[test]
fn nothing_is_found_behind_rules_that_are_not_kept() {
    let inner = vec![from("docker0"); 2];
    let behind = |most: usize, condition: Bytes| {
        let leading = [condition, verdict(JUMP, "inner")].concat();
        let tables = Tables::default().with_first(most, "inner", &inner);
        found(tables.with("PREROUTING", &[leading, [wireguards(), to_pod()].concat()]))
    };
    assert_eq!(behind(2, wireguards()), at("PREROUTING", 2));
    assert_eq!(behind(1, wireguards()), [], "the other one may accept the packet");
    assert_eq!(behind(1, source("198.51.100.9")), [], "it may come to them");
    assert_eq!(behind(1, protocol(6)), at("PREROUTING", 2), "it does not come to them");
}

#[test]
fn of_a_thousand_rules_for_the_port_some_are_found() {
    let rules = vec![[source("198.51.100.9"), wireguards(), to_pod()].concat(); 1000];
    assert_eq!(found(Tables::default().with("PREROUTING", &rules)).len(), MAX_FOUND);
}

#[test]
fn chains_that_lead_to_each_other_end() {
    let jumps = |to: &str| vec![verdict(JUMP, to); 3];
    let tables = Tables::default().with("PREROUTING", &jumps("a")).with("a", &jumps("PREROUTING"));
    assert_eq!(found(tables), []);
}

proptest! {
    #[test]
    fn garbage_is_an_error_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = steps::parse(&bytes, 1);
        let _ = extensions::translation("DNAT", &bytes);
        for (name, revision) in [("addrtype", 1), ("multiport", 1), ("udp", 0)] {
            let _ = extensions::conditions(name, revision, &bytes);
        }
    }

    #[test]
    fn hostile_registers_and_lengths_are_nothing(
        register in any::<u32>(),
        other in 0_u32..30,
        length in any::<u32>(),
        operand in proptest::collection::vec(any::<u8>(), 0..100),
    ) {
        let operands = operand.iter().map(|byte| (*byte, *byte)).collect();
        let (from, to) = (register, other);
        let rule = NatRule {
            steps: vec![
                Step::Load { register: other, field: Field::Payload { header: 2, offset: length, length } },
                Step::Constant { register: other, bytes: operand.clone() },
                Step::Bitwise { from, to, operands },
                Step::Range { register, is_inverted: true, first: operand.clone(), last: operand.clone() },
                Step::Compare { register: other, operation: Comparison::of(length), with: operand },
            ],
            ..NatRule::default()
        };
        let arrival = arrival(NODE);
        let _ = pass(&rule, Packet { arrival: &arrival, own: &[] }, &mut Tables::default()).unwrap();
    }
}
