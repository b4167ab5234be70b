//! Egresses and annotations that change while client pods run.

use std::io::Read as _;
use std::net::IpAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed_lab::traffic::Flow;
use testbed_lab::{ForeignNetwork, Place as _, eventually};
use testbed_nodes::Cluster;

use crate::bed::{Pod, Room, TIMEOUT, network, server};
use crate::egress::BED;
use crate::egress::outside::{connect, no_client_address_was_seen, outside, run};

/// An Egress of the test's own, whose gateways have addresses that nodes translate.
fn egress(destinations: &[String]) -> String {
    let list = destinations.join(", ");
    format!(
        "apiVersion: coil.cybozu.com/v2\nkind: Egress\nmetadata: {{name: own}}\nspec: {{destinations: [{list}]}}\n"
    )
}

/// A client pod, and the Egress, ready.
fn begin(room: &Room<'_>, destinations: &[String]) -> Pod {
    room.apply(&egress(destinations)).unwrap();
    let ready = || {
        let replicas = room.kubectl("get egress own -o jsonpath={.status.replicas}")?;
        ensure!(replicas == "1", "{replicas:?} gateways are ready");
        Ok(())
    };
    eventually(TIMEOUT, ready).with_context(|| room.cluster.explain()).unwrap();
    let annotations = format!("egress.coil.cybozu.com/{}: own", room.name);
    let manifest = server("client", 1).replace(
        "metadata: {labels: {app: client}}",
        &format!("metadata: {{labels: {{app: client}}, annotations: {{{annotations}}}}}"),
    );
    room.run("deployment/client", &manifest).remove(0)
}

/// Link that the pod's packets to an address take; an error says that they go nowhere.
fn link_to(place: &ForeignNetwork, to: IpAddr) -> Result<String> {
    let route = run(place, &format!("ip route get {to}"))?;
    let mut words = route.split_whitespace().skip_while(|word| *word != "dev");
    Ok(words.nth(1).with_context(|| format!("no device: {route}"))?.to_owned())
}

/// Waits until packets to `to` leave by a tunnel (or by eth0).
fn leaves_by(place: &ForeignNetwork, to: IpAddr, link: &str) {
    let leaves = || {
        let found = link_to(place, to)?;
        ensure!(found.starts_with(link), "packets to {to} leave by {found}");
        Ok(())
    };
    eventually(TIMEOUT, leaves)
        .with_context(|| run(place, "ip rule; ip route show table 118").unwrap_or_default())
        .unwrap();
}

fn outside_address(cluster: &Cluster) -> IpAddr {
    outside(cluster).addresses()[0]
}

#[test]
fn a_change_of_destinations_touches_one_route_and_no_flow() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "live");
    let to = outside_address(&cluster);
    let other: IpAddr = [203, 0, 113, 77].into();
    let pod = begin(&room, &[format!("{to}/32")]);
    let place = network(&cluster, &pod);
    leaves_by(&place, to, "fou4_");
    leaves_by(&place, other, "eth0");
    let flow = Flow::tcp(&place, &*outside(&cluster).host, to).unwrap();
    flows(&flow);
    let mark = Instant::now();
    // Another program of the pod's namespace, which writes down what changes.
    let monitor = Monitor::start(&place);
    room.apply(&egress(&[format!("{to}/32"), "203.0.113.77/32".to_owned()])).unwrap();
    leaves_by(&place, other, "fou4_");
    room.apply(&egress(&[format!("{to}/32")])).unwrap();
    leaves_by(&place, other, "eth0");
    let changes = monitor.end();
    let changed: Vec<&str> = changes.lines().filter(|line| !line.trim().is_empty()).collect();
    assert!(!changed.is_empty() && changed.iter().all(|line| line.contains("203.0.113.77")), "{changes}");
    flows(&flow);
    let figures = flow.figures_since(mark);
    assert!(figures.lost == 0 && flow.ended().is_none(), "{figures:?} {:?}", flow.ended());
    no_client_address_was_seen(&cluster);
}

/// Waits until messages of now arrive.
fn flows(flow: &Flow) {
    let mark = Instant::now();
    eventually(TIMEOUT, || {
        ensure!(flow.flows_since(mark), "{} has stopped: {:?}", flow.name(), flow.ended());
        Ok(())
    })
    .unwrap();
}

/// `ip monitor` in a pod's network.
struct Monitor {
    child: Child,
}

impl Monitor {
    fn start(place: &ForeignNetwork) -> Self {
        let mut command = Command::new("ip");
        command.args(["monitor", "route", "rule"]).stdout(Stdio::piped());
        let child = place.inside(|| command.spawn()).unwrap().unwrap();
        // It says nothing when it has begun; a change of its own would disturb what is counted.
        std::thread::sleep(Duration::from_millis(500));
        Self { child }
    }

    fn end(mut self) -> String {
        std::thread::sleep(Duration::from_millis(500));
        self.child.kill().unwrap();
        let mut text = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        let _ = self.child.wait();
        text
    }
}

#[test]
fn a_deleted_egress_leaves_nothing_in_its_clients_and_lets_nothing_out_by_eth0() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "deleted");
    let to = outside_address(&cluster);
    let pod = begin(&room, &[format!("{to}/32")]);
    let place = network(&cluster, &pod);
    leaves_by(&place, to, "fou4_");
    connect(&place, to).unwrap();

    room.kubectl("delete egress own").unwrap();
    let is_refused = || {
        let error = link_to(&place, to).err().context("packets still leave")?.to_string();
        ensure!(error.contains("No route to host") || error.contains("unreachable"), "{error}");
        ensure!(!run(&place, "ip -br link")?.contains("fou4_"), "the tunnel is still there");
        Ok(())
    };
    eventually(TIMEOUT, is_refused).unwrap();

    // Its author takes the annotation away: the pod leaves as others do.
    let annotation = format!("egress.coil.cybozu.com/{}-", room.name);
    room.kubectl(&format!("annotate pod {} {annotation}", pod.name)).unwrap();
    leaves_by(&place, to, "eth0");
    let is_clean = || {
        let left = run(&place, "ip rule; ip route show table 117; ip route show table 118; ip -br link")?;
        let is_ours = |line: &str| {
            ["lookup 117", "lookup 118", "fou4_", "unreachable"].iter().any(|word| line.contains(word))
        };
        ensure!(!left.lines().any(is_ours), "{left}");
        Ok(())
    };
    eventually(TIMEOUT, is_clean).unwrap();
    let (_, seen) = connect(&place, to).unwrap();
    assert!(!pod.addresses.contains(&seen), "{pod:?} came from {seen}, not translated by its node");

    // And it comes back with both.
    room.apply(&egress(&[format!("{to}/32")])).unwrap();
    room.kubectl(&format!("annotate pod {} egress.coil.cybozu.com/{}=own", pod.name, room.name)).unwrap();
    leaves_by(&place, to, "fou4_");
    eventually(TIMEOUT, || connect(&place, to).map(drop)).unwrap();
    no_client_address_was_seen(&cluster);
}

#[test]
fn a_new_address_of_the_service_is_followed() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "service");
    let to = outside_address(&cluster);
    let pod = begin(&room, &[format!("{to}/32")]);
    let place = network(&cluster, &pod);
    leaves_by(&place, to, "fou4_");
    let before = link_to(&place, to).unwrap();
    room.kubectl("delete service own").unwrap();
    let begun = Instant::now();
    let moves = || {
        let link = link_to(&place, to)?;
        ensure!(link.starts_with("fou4_") && link != before, "{link}, as before");
        Ok(begun.elapsed())
    };
    let took = eventually(TIMEOUT, moves).unwrap();
    println!("a Service made anew: its address is used after {took:.2?}");
    eventually(TIMEOUT, || connect(&place, to).map(drop)).unwrap();
    no_client_address_was_seen(&cluster);
}
