use super::*;

struct Kernel;

impl Host for Kernel {
    fn link_of(&self, pod: IpAddr) -> Option<u32> {
        (pod != address("10.1.0.9")).then_some(7)
    }

    fn has(&self, address: IpAddr) -> bool {
        address == "192.0.2.10".parse::<IpAddr>().unwrap()
    }
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn nat() -> EgressName {
    EgressName { namespace: "internet-egress".to_owned(), name: "nat".to_owned() }
}

fn gateway(number: u8) -> Gateway {
    let addresses = [IpAddr::from([10, 1, 0, number])].into_iter().collect();
    Gateway { egress: nat(), uid: format!("u{number}"), pod: format!("nat-{number}"), addresses }
}

fn hold(number: u8, held: &str, term: u64) -> HeardHold {
    let (gateway, until) = (format!("u{number}"), Instant::now());
    HeardHold { egress: nat(), gateway, address: address(held), term, until, is_ready: true }
}

fn listed(addresses: &[&str]) -> Permitted {
    [(nat(), addresses.iter().map(|text| (address(text), None)).collect())].into()
}

fn planned(holds: &[HeardHold], before: &BTreeMap<IpAddr, Announced>) -> Plan {
    let gateways = [gateway(5), gateway(6), gateway(9)];
    let permitted = listed(&["192.0.2.10", "192.0.2.40", "192.0.2.41", "2001:db8::40"]);
    plan(&permitted, &gateways, holds, before, &Kernel)
}

fn shown(plan: &Plan) -> Vec<String> {
    let shown = |it: &Announced| format!("{} {} {}", it.source.address, it.pod, it.term);
    plan.announced.values().map(shown).collect()
}

fn reasons(plan: &Plan) -> Vec<&'static str> {
    plan.problems.iter().map(Problem::reason).collect()
}

#[test]
fn what_a_gateway_of_this_node_holds_and_its_egress_may_have_is_announced() {
    let none = BTreeMap::new();
    let plan = planned(&[hold(5, "192.0.2.40", 3), hold(6, "192.0.2.41", 1)], &none);
    assert_eq!(shown(&plan), ["192.0.2.40 nat-5 3", "192.0.2.41 nat-6 1"]);
    let source = plan.announced[&address("192.0.2.40")].source;
    assert_eq!(source, Source { address: address("192.0.2.40"), pod: address("10.1.0.5"), link: 7 });
    assert!(plan.problems.is_empty());
    let plan = planned(&[hold(7, "192.0.2.40", 3)], &none);
    assert_eq!(plan, Plan::default(), "it is no gateway of this node");
}

#[test]
fn what_cannot_be_announced_has_a_reason() {
    for (held, reason) in [
        (hold(5, "203.0.113.9", 1), "SourceAddressNotListed"),
        (hold(5, "192.0.2.10", 1), "SourceAddressOfNode"),
        (hold(9, "192.0.2.40", 1), "SourceAddressWithoutLink"),
        (hold(5, "2001:db8::40", 1), "SourceAddressWithoutLink"),
    ] {
        let plan = planned(&[held], &BTreeMap::new());
        assert_eq!((shown(&plan).len(), reasons(&plan)), (0, vec![reason]));
    }
}

#[test]
fn of_two_holders_the_newer_one_counts_and_of_equal_ones_the_one_before() {
    let (five, six) = (hold(5, "192.0.2.40", 3), hold(6, "192.0.2.40", 4));
    let plan = planned(&[five.clone(), six], &BTreeMap::new());
    assert_eq!((shown(&plan), reasons(&plan)), (vec!["192.0.2.40 nat-6 4".to_owned()], vec![]));
    let both = [five.clone(), hold(6, "192.0.2.40", 3)];
    let plan = planned(&both, &BTreeMap::new());
    assert_eq!((shown(&plan).len(), reasons(&plan)), (0, vec!["SourceAddressHeldTwice"]));
    let before = planned(&[five], &BTreeMap::new()).announced;
    assert_eq!(shown(&planned(&both, &before)), ["192.0.2.40 nat-5 3"]);
}

#[test]
fn a_gateway_that_hands_over_to_one_of_the_same_node_keeps_it_until_that_one_is_ready() {
    let (five, six) = (hold(5, "192.0.2.40", 3), hold(6, "192.0.2.40", 4));
    let standby = HeardHold { is_ready: false, ..six.clone() };
    let before = planned(std::slice::from_ref(&five), &BTreeMap::new()).announced;
    let of = |holds: &[HeardHold], before| shown(&planned(holds, before));
    assert_eq!(of(&[five.clone(), standby.clone()], &before), ["192.0.2.40 nat-5 3"]);
    assert_eq!(of(&[five.clone(), six], &before), ["192.0.2.40 nat-6 4"]);
    assert_eq!(of(std::slice::from_ref(&standby), &before), ["192.0.2.40 nat-6 4"], "the other one is gone");
    let none = BTreeMap::new();
    assert_eq!(of(&[five, standby], &none), ["192.0.2.40 nat-6 4"], "neither had it here before");
}

#[test]
fn what_was_there_at_the_start_stays_until_it_is_confirmed_or_two_seconds_after_it_could_have_been() {
    let second = Duration::from_secs(1);
    let (start, both) = (Instant::now(), ["192.0.2.40", "192.0.2.41"].map(address));
    let mut adopted = Adopted::new(both.into());
    let (nothing, none) = (Plan::default(), BTreeSet::new());
    assert_eq!(adopted.kept(&nothing, None, start + 10 * second).len(), 2, "the API server is away");
    // The gateway of one of them does not answer yet.
    let awaited = [both[1]].into();
    assert_eq!(adopted.kept(&nothing, Some(&awaited), start + 11 * second).len(), 2);
    assert_eq!(adopted.end(), Some(start + 13 * second));
    assert_eq!(adopted.kept(&nothing, Some(&awaited), start + 13 * second), [both[1]].into());
    assert_eq!(adopted.end(), Some(start + 41 * second), "30 s after it is known which gateways there are");
    assert_eq!(adopted.kept(&nothing, Some(&none), start + 20 * second), [both[1]].into());
    assert_eq!(adopted.end(), Some(start + 22 * second));
    let confirmed = planned(&[hold(5, "192.0.2.41", 3)], &BTreeMap::new());
    assert!(adopted.kept(&confirmed, Some(&none), start + 21 * second).is_empty() && adopted.is_empty());
    assert_eq!(adopted.end(), None);
    let mut adopted = Adopted::new(both.into());
    assert_eq!(adopted.kept(&nothing, None, start + 3600 * second).len(), 2, "the API server is away");
    assert_eq!(adopted.end(), None);
    let (unheard, there) = (BTreeSet::from(both), start + 3601 * second);
    assert_eq!(adopted.kept(&nothing, Some(&unheard), there).len(), 2);
    assert_eq!(adopted.kept(&nothing, Some(&unheard), there + 29 * second).len(), 2);
    assert!(adopted.kept(&nothing, Some(&unheard), there + 30 * second).is_empty(), "after 30 s");
}

#[test]
fn an_address_is_awaited_from_a_gateway_that_was_not_heard_unless_another_one_is_named() {
    let named = |pod: Option<&str>| -> Permitted {
        [(nat(), [(address("192.0.2.40"), pod.map(str::to_owned))].into())].into()
    };
    let gateways = [gateway(5), gateway(6)];
    let heard = |numbers: &[u8]| numbers.iter().map(|number| (nat(), format!("u{number}"))).collect();
    for (pod, heard, expected) in [
        (None, heard(&[5]), true),
        (None, heard(&[5, 6]), false),
        (Some("nat-6"), heard(&[5]), true),
        (Some("nat-5"), heard(&[5]), false),
        (Some("elsewhere"), heard(&[]), false),
    ] {
        assert_eq!(!awaited(&named(pod), &gateways, &heard).is_empty(), expected, "{pod:?} {heard:?}");
    }
}

#[test]
fn what_is_new_of_an_egress_that_changes_too_often_waits_and_what_is_there_stays() {
    let (now, mut pace, none) = (Instant::now(), Pace::default(), BTreeMap::new());
    let (kept, new) = (hold(5, "192.0.2.40", 3), hold(6, "192.0.2.41", 1));
    let before = planned(std::slice::from_ref(&kept), &none).announced;
    let at = |before: &BTreeMap<IpAddr, Announced>, pace: &mut Pace, now| {
        let mut plan = planned(&[kept.clone(), new.clone()], before);
        let again = hold_down(&mut plan, before, pace, now);
        (plan.announced.len(), reasons(&plan), again)
    };
    while at(&before, &mut pace, now).2.is_none() {}
    let next = now + Duration::from_secs(1);
    assert_eq!(at(&before, &mut pace, now), (1, vec!["SourceAddressFlapping"], Some(next)));
    let both = planned(&[kept.clone(), new.clone()], &none).announced;
    assert_eq!(at(&both, &mut pace, now), (2, vec![], None), "nothing is new");
    assert_eq!(at(&before, &mut pace, next), (2, vec![], None));
}

#[test]
fn a_takeover_is_an_address_that_another_gateway_had() {
    let held = |term| planned(&[hold(5, "192.0.2.40", term)], &BTreeMap::new()).announced;
    let named = |pod: Option<&str>| -> Permitted {
        [(nat(), [(address("192.0.2.40"), pod.map(str::to_owned))].into())].into()
    };
    for (pod, term, expected) in
        [(None, 1, false), (None, 2, true), (Some("nat-5"), 2, false), (Some("nat-6"), 2, true)]
    {
        assert_eq!(is_takeover(&held(term)[&address("192.0.2.40")], &named(pod)), expected);
    }
}
