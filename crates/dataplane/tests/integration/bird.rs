//! A routing daemon judges the export table: Debian's BIRD reads table 119 on a node and tells another BIRD by BGP, whose
//! kernel then has routes to exactly this node's blocks.

use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use fairlead_dataplane::routes::sync_export;
use fairlead_dataplane::routing_ids::RoutingIds;
use ipnet::IpNet;
use testbed_lab::{Host, Ipv6, Lab, Nat, Process, SiteOptions};

const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn bird_reads_table_119_and_another_bird_learns_exactly_the_blocks() {
    let lab = Lab::new().unwrap();
    let lan = "198.51.100.0/24".parse().unwrap();
    let ipv6 = Ipv6::Local("fd00:1b::/64".parse().unwrap());
    let site = lab.site("rack", SiteOptions { ipv6, ..SiteOptions::new(Nat::None, lan) }).unwrap();
    let (node, neighbour) = (site.host("node").unwrap(), site.host("neighbour").unwrap());
    let directory = tempfile::tempdir().unwrap();

    let mut blocks =
        ["10.1.0.0/27", "10.1.0.64/27", "10.9.0.7/32", "fd01::/123", "fd01::40/123"].map(prefix).to_vec();
    export(&node, &blocks);
    // Routes of others, in their tables, are not blocks.
    node.shell("ip route add blackhole 10.7.0.0/24; ip route add blackhole 10.8.0.0/24 table 118").unwrap();
    let (from, to) = (addresses(&node), addresses(&neighbour));
    let _exporter = bird(&node, directory.path(), &exporter(&from, &to));
    let _learner = bird(&neighbour, directory.path(), &learner(&to, &from));
    learns(&neighbour, &from, &blocks);

    blocks.retain(|block| *block != prefix("10.1.0.64/27") && *block != prefix("fd01::/123"));
    blocks.push(prefix("10.1.1.0/27"));
    export(&node, &blocks);
    learns(&neighbour, &from, &blocks);

    export(&node, &[]);
    learns(&neighbour, &from, &[]);
}

fn prefix(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn export(node: &Host, blocks: &[IpNet]) {
    node.run(|| sync_export(RoutingIds::default(), blocks).unwrap()).unwrap();
}

/// IPv4, then IPv6.
fn addresses(host: &Host) -> [IpAddr; 2] {
    [host.address().into(), host.address6().unwrap().into()]
}

/// Configuration of BIRD on both ends: a session in each family.
fn sessions(own: &[IpAddr; 2], other: &[IpAddr; 2], numbers: [u32; 2], policy: &str) -> String {
    let session = |family: &str, index: usize| {
        format!(
            "protocol bgp neighbour{family} {{\n  local {} as {};\n  neighbor {} as {};\n  connect delay time 1;\n  \
             error wait time 1, 2;\n  {family} {{ {policy} next hop self; }};\n}}\n",
            own[index], numbers[0], other[index], numbers[1]
        )
    };
    format!(
        "router id {};\nprotocol device {{ scan time 1; }}\n{}{}",
        own[0],
        session("ipv4", 0),
        session("ipv6", 1)
    )
}

/// Imports table 119 as Coil's documentation shows it, and tells the neighbour.
fn exporter(own: &[IpAddr; 2], other: &[IpAddr; 2]) -> String {
    let kernel = |family: &str| {
        format!(
            "protocol kernel export{family} {{\n  kernel table 119;\n  learn;\n  scan time 1;\n  \
             {family} {{ import all; export none; }};\n}}\n"
        )
    };
    let sessions = sessions(own, other, [65001, 65002], "import none; export all;");
    format!("{sessions}{}{}", kernel("ipv4"), kernel("ipv6"))
}

/// Puts what it learns into its kernel's main table.
fn learner(own: &[IpAddr; 2], other: &[IpAddr; 2]) -> String {
    let kernel = |family: &str| {
        format!("protocol kernel main{family} {{ {family} {{ import none; export all; }}; }}\n")
    };
    let sessions = sessions(own, other, [65002, 65001], "import all; export none;");
    format!("{sessions}{}{}", kernel("ipv4"), kernel("ipv6"))
}

fn bird(host: &Host, directory: &Path, configuration: &str) -> Process {
    let at = |ending: &str| directory.join(format!("{}.{ending}", host.name()));
    std::fs::write(at("conf"), configuration).unwrap();
    let mut command = host.command("/usr/sbin/bird").unwrap();
    command.arg("-f").arg("-c").arg(at("conf")).arg("-s").arg(at("ctl")).arg("-P").arg(at("pid"));
    host.spawn(&mut command, at("log")).unwrap_or_else(|error| {
        panic!("BIRD does not start ({error:#}): install it with `cargo xtask setup` (Debian package bird2)")
    })
}

/// Waits until the neighbour's kernel has routes of BIRD's to exactly these blocks, through the node.
fn learns(neighbour: &Host, node: &[IpAddr; 2], blocks: &[IpNet]) {
    let mut wanted: Vec<String> = blocks
        .iter()
        .map(|block| {
            let host = block.prefix_len() == block.max_prefix_len();
            let destination = if host { block.addr().to_string() } else { block.to_string() };
            format!("{destination} via {}", node[usize::from(block.addr().is_ipv6())])
        })
        .collect();
    wanted.sort();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let text = neighbour.shell("ip -4 route show proto bird; ip -6 route show proto bird").unwrap();
        let mut found: Vec<String> =
            text.lines().map(|line| line.split_whitespace().take(3).collect::<Vec<_>>().join(" ")).collect();
        found.sort();
        if found == wanted {
            return;
        }
        assert!(Instant::now() < deadline, "wanted {wanted:?}, learnt {found:?}:\n{text}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
