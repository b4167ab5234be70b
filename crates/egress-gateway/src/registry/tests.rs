//! Acceptance of clients; no Node can take anything from another one.

use fairlead_address::DualStackAddrs;
use ipnet::IpNet;
use proptest::prelude::*;

use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn facts(nodes: &[(&str, &str)]) -> Facts {
    let mut facts = Facts::default();
    for (node, prefixes) in nodes {
        facts.nodes.insert((*node).to_owned());
        for prefix in prefixes.split(' ') {
            facts.blocks.add(node, prefix.parse().unwrap());
        }
    }
    facts
}

fn client(uid: &str, address: &str) -> Client {
    let addresses = DualStackAddrs { ipv4: Some(address.parse().unwrap()), ipv6: None };
    Client { uid: uid.to_owned(), namespace: "default".to_owned(), name: uid.to_owned(), addresses }
}

/// Two nodes, and a gateway that has just started.
fn registry(adopted: &[&str]) -> Registry {
    let mut registry = Registry::new(vec![ip("10.1.0.200")], adopted.iter().map(|text| ip(text)));
    registry.set_facts(facts(&[("a", "10.1.0.0/24"), ("b", "10.2.0.0/24 10.1.0.128/25")]));
    registry
}

fn all(registry: &mut Registry, node: &str, clients: &[(&str, &str)]) -> StreamId {
    let stream = registry.begin(node);
    let clients = clients.iter().map(|(uid, address)| client(uid, address)).collect();
    assert_eq!(registry.update(node, stream, Update::All(clients)), Ok(Vec::new()));
    stream
}

fn addresses(registry: &Registry) -> Vec<String> {
    registry.addresses().iter().map(ToString::to_string).collect()
}

fn refused(registry: &Registry, node: &str) -> Vec<(String, Reason)> {
    registry.refusals(node).map(|refusal| (refusal.uid.clone(), refusal.reason)).collect()
}

#[test]
fn a_node_registers_its_own_pods_only() {
    let mut registry = registry(&[]);
    all(&mut registry, "a", &[("1", "10.1.0.1"), ("2", "10.2.0.1"), ("3", "10.1.0.200")]);
    assert_eq!(addresses(&registry), ["10.1.0.1"]);
    let expected = [("2".to_owned(), Reason::AddressNotOfNode), ("3".to_owned(), Reason::InvalidAddress)];
    assert_eq!(refused(&registry, "a"), expected);
    all(&mut registry, "stranger", &[("1", "10.1.0.9")]);
    assert_eq!(refused(&registry, "stranger"), [("1".to_owned(), Reason::AddressNotOfNode)]);
}

#[test]
fn a_claim_is_accepted_once_its_block_is_seen_and_dropped_with_it() {
    let mut registry = registry(&[]);
    all(&mut registry, "a", &[("1", "10.3.0.1")]);
    assert_eq!(addresses(&registry), Vec::<String>::new());
    registry.set_facts(facts(&[("a", "10.3.0.0/24")]));
    assert_eq!(addresses(&registry), ["10.3.0.1"]);
    let version = registry.version();
    registry.set_facts(facts(&[("a", "10.3.0.0/24")]));
    assert_eq!(registry.version(), version);
    let mut without = facts(&[("a", "10.3.0.0/24")]);
    without.namespaces = Some(BTreeSet::new());
    registry.set_facts(without);
    assert_eq!(refused(&registry, "a"), [("1".to_owned(), Reason::NamespaceNotAllowed)]);
    registry.set_facts(facts(&[]));
    assert_eq!(addresses(&registry), Vec::<String>::new());
}

#[test]
fn clients_outlive_their_stream_until_the_next_full_set() {
    let mut registry = registry(&[]);
    let first = all(&mut registry, "a", &[("1", "10.1.0.1"), ("2", "10.1.0.2")]);
    registry.end("a", first);
    assert_eq!(addresses(&registry), ["10.1.0.1", "10.1.0.2"]);
    let second = registry.begin("a");
    assert_eq!(registry.update("a", first, Update::All(Vec::new())), Err(ProtocolError::Replaced));
    assert_eq!(
        registry.update("a", second, Update::Change(Vec::new(), Vec::new())),
        Err(ProtocolError::ChangeFirst)
    );
    assert_eq!(registry.update("a", second, Update::All(vec![client("2", "10.1.0.2")])), Ok(Vec::new()));
    assert_eq!(addresses(&registry), ["10.1.0.2"]);
    let change = Update::Change(vec![client("3", "10.1.0.3")], vec!["2".to_owned()]);
    assert_eq!(registry.update("a", second, change), Ok(Vec::new()));
    assert_eq!(addresses(&registry), ["10.1.0.3"]);
}

#[test]
fn revisions_grow() {
    let mut registry = registry(&[]);
    let stream = registry.begin("a");
    assert_eq!(
        [1, 2, 2, 1].map(|revision| registry.check("a", stream, revision).is_ok()),
        [true, true, false, false]
    );
}

#[test]
fn the_newest_pod_of_a_node_has_the_address_and_the_first_node_keeps_it() {
    let mut registry = registry(&[]);
    let a = all(&mut registry, "a", &[("1", "10.1.0.130")]);
    registry.update("a", a, Update::Change(vec![client("2", "10.1.0.130")], Vec::new())).unwrap();
    assert_eq!(registry.owners()[&ip("10.1.0.130")].client.uid, "2");
    assert_eq!(refused(&registry, "a"), [("1".to_owned(), Reason::AddressInUse)]);
    // An address that is in prefixes of both.
    let b = all(&mut registry, "b", &[("3", "10.1.0.130")]);
    assert_eq!(registry.owners()[&ip("10.1.0.130")].node, "a");
    assert_eq!(refused(&registry, "b"), [("3".to_owned(), Reason::AddressInUse)]);
    registry.update("a", a, Update::All(Vec::new())).unwrap();
    assert_eq!(registry.owners()[&ip("10.1.0.130")].node, "b");
    registry.end("b", b);
    assert!(refused(&registry, "b").is_empty());
}

#[test]
fn adopted_clients_wait_for_their_node() {
    let mut registry = registry(&["10.1.0.1", "10.1.0.2", "10.2.0.1", "10.9.0.1"]);
    assert_eq!(addresses(&registry).len(), 4);
    all(&mut registry, "a", &[("1", "10.1.0.1")]);
    assert_eq!(addresses(&registry), ["10.1.0.1", "10.2.0.1", "10.9.0.1"], "a has sent all");
    registry.end_grace();
    assert_eq!(addresses(&registry), ["10.1.0.1", "10.2.0.1"], "b may still start again");
    all(&mut registry, "b", &[]);
    assert_eq!(addresses(&registry), ["10.1.0.1"]);
}

#[test]
fn too_many_are_refused_and_wait_for_room() {
    let mut registry = Registry::new(Vec::new(), []);
    registry.set_facts(facts(&[("a", "10.0.0.0/8")]));
    let stream = registry.begin("a");
    let number =
        |number: usize| client(&number.to_string(), &format!("10.1.{}.{}", number / 250, 1 + number % 250));
    let clients = (0..MAX_CLAIMS + 1).map(number).collect();
    let refused = registry.update("a", stream, Update::All(clients)).unwrap();
    assert_eq!(refused.len(), 1);
    assert_eq!((registry.addresses().len(), registry.refusals("a").count()), (MAX_PER_NODE, MAX_PER_NODE));
    registry.update("a", stream, Update::Change(Vec::new(), vec!["0".to_owned()])).unwrap();
    assert_eq!(
        (registry.addresses().len(), registry.refusals("a").count()),
        (MAX_PER_NODE, MAX_PER_NODE - 1)
    );
}

#[derive(Debug, Clone)]
enum Step {
    Begin(usize),
    End(usize),
    All(usize, Vec<(u8, u8)>),
    Change(usize, Vec<(u8, u8)>, Vec<u8>),
    Facts(Vec<(usize, u8)>),
    Grace,
}

const NODES: [&str; 3] = ["a", "b", "c"];

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let node = || 0..NODES.len();
    let clients = || proptest::collection::vec((0..6u8, 0..24u8), 0..5);
    let step = prop_oneof![
        node().prop_map(Step::Begin),
        node().prop_map(Step::End),
        (node(), clients()).prop_map(|(node, clients)| Step::All(node, clients)),
        (node(), clients(), proptest::collection::vec(0..6u8, 0..3))
            .prop_map(|(node, set, removed)| Step::Change(node, set, removed)),
        // Prefixes of eight addresses, which may be of several Nodes.
        proptest::collection::vec((node(), 0..3u8), 0..5).prop_map(Step::Facts),
        Just(Step::Grace),
    ];
    proptest::collection::vec(step, 0..40)
}

fn clients(node: usize, list: &[(u8, u8)]) -> Vec<Client> {
    list.iter().map(|(uid, last)| client(&format!("{node}-{uid}"), &format!("10.0.0.{last}"))).collect()
}

/// The Node that a step is a message of.
fn apply(registry: &mut Registry, streams: &mut BTreeMap<usize, StreamId>, step: &Step) -> Option<usize> {
    match step {
        Step::Begin(node) => drop(streams.insert(*node, registry.begin(NODES[*node]))),
        Step::End(node) => {
            if let Some(stream) = streams.remove(node) {
                registry.end(NODES[*node], stream);
            }
        }
        Step::All(node, list) => {
            if let Some(stream) = streams.get(node) {
                registry.update(NODES[*node], *stream, Update::All(clients(*node, list))).unwrap();
            }
        }
        Step::Change(node, set, removed) => {
            let removed = removed.iter().map(|uid| format!("{node}-{uid}")).collect();
            if let Some(stream) = streams.get(node) {
                let _ = registry.update(NODES[*node], *stream, Update::Change(clients(*node, set), removed));
            }
        }
        Step::Facts(list) => {
            let mut facts = Facts::default();
            for (node, part) in list {
                let prefix: IpNet = format!("10.0.0.{}/29", part * 8).parse().unwrap();
                facts.nodes.insert(NODES[*node].to_owned());
                facts.blocks.add(NODES[*node], prefix);
            }
            registry.set_facts(facts);
        }
        Step::Grace => registry.end_grace(),
    }
    match step {
        Step::Begin(node) | Step::End(node) | Step::All(node, _) | Step::Change(node, ..) => Some(*node),
        Step::Facts(_) | Step::Grace => None,
    }
}

proptest! {
    #[test]
    fn no_node_takes_anything_from_another(steps in steps(), adopted in proptest::collection::btree_set(0..24u8, 0..4)) {
        let adopted = adopted.into_iter().map(|last| IpAddr::from([10, 0, 0, last]));
        let mut registry = Registry::new(Vec::new(), adopted);
        let mut streams = BTreeMap::new();
        for step in &steps {
            let before = registry.owners().clone();
            let (version, addresses) = (registry.version(), registry.addresses());
            if let Some(by) = apply(&mut registry, &mut streams, step) {
                for (address, owner) in before.iter().filter(|(_, owner)| owner.node != NODES[by]) {
                    prop_assert_eq!(registry.owners().get(address), Some(owner), "{:?}", step);
                }
            }
            for (address, owner) in registry.owners() {
                prop_assert!(registry.facts.is_of(&owner.node, *address), "{}", address);
                prop_assert!(owner.client.addresses.iter().any(|own| own == *address));
            }
            let refused: usize = NODES.iter().map(|node| registry.refusals(node).count()).sum();
            let claimed: usize = registry.nodes.values().map(|of_node| of_node.claims.len()).sum();
            let accepted: BTreeSet<&str> = registry.owners().values().map(|owner| owner.client.uid.as_str()).collect();
            prop_assert_eq!(refused + accepted.len(), claimed, "each claim is either accepted or refused");
            prop_assert!(registry.version() != version || registry.addresses() == addresses);
        }
    }
}

#[test]
fn an_update_that_says_what_is_known_changes_nothing() {
    let mut registry = registry(&[]);
    let known = vec![client("1", "10.1.0.1"), client("2", "10.1.0.2")];
    let changes = |registry: &Registry, update| registry.changes("a", &update);
    assert_eq!(changes(&registry, Update::All(known.clone())), 2);
    all(&mut registry, "a", &[("1", "10.1.0.1"), ("2", "10.1.0.2")]);
    registry.begin("a");
    assert_eq!(changes(&registry, Update::All(known)), 0, "as after a restart of the node program");
    assert_eq!(changes(&registry, Update::All(Vec::new())), 2);
    assert_eq!(changes(&registry, Update::All(vec![client("1", "10.1.0.9")])), 2);
    let removed = vec!["2".to_owned(), "unknown".to_owned()];
    assert_eq!(changes(&registry, Update::Change(vec![client("3", "10.1.0.3")], removed)), 2);
}
