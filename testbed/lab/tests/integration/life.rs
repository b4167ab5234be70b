//! A lab is made quickly, is invisible outside, and leaves nothing behind.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{at, lan, receive, seen, socket};
use testbed_lab::{Host, Lab, Namespace, Nat};

fn three_sites(lab: &Lab) -> Vec<Host> {
    let cloud = lab.dual_stack_site("cloud");
    let mut hosts: Vec<Host> = ["cloud-1", "cloud-2"].iter().map(|name| cloud.host(name).unwrap()).collect();
    for site_name in ["home", "office"] {
        let site = lab.nat_site(site_name, Nat::PortRestricted, lan("192.168.1.0/24")).unwrap();
        hosts.extend([1, 2].map(|number| site.host(&format!("{site_name}-{number}")).unwrap()));
    }
    hosts
}

fn process_exists(process: u32) -> bool {
    Path::new(&format!("/proc/{process}")).exists()
}

/// Whether any process, or any open file of this one, still holds the network namespace.
fn network_is_held(inode: u64) -> bool {
    let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path().join("ns/net"));
    let own_files = fs::read_dir("/proc/self/fd").unwrap().flatten().map(|entry| entry.path());
    let name = format!("net:[{inode}]");
    processes
        .chain(own_files)
        .filter_map(|path| fs::read_link(path).ok())
        .any(|link| link == Path::new(&name))
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < common::TIMEOUT, "not within {:?}: {what}", common::TIMEOUT);
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn three_sites_with_six_hosts_are_made_quickly_and_vanish() {
    let start = Instant::now();
    let lab = Lab::new().unwrap();
    let hosts = three_sites(&lab);
    let made = start.elapsed();
    let observer = socket(&hosts[0], 4000);
    for host in &hosts[1..] {
        let source =
            seen(&socket(host, 5000), &observer, at(hosts[0].address(), 4000), common::TIMEOUT).unwrap();
        assert_eq!(source.ip(), host.public_address());
    }
    drop(observer);
    let names: Vec<(u32, u64)> = hosts.iter().map(|host| (host.holder_pid(), host.network_inode())).collect();
    let start = Instant::now();
    drop(lab);
    println!("3 sites, 6 hosts: made in {made:?}, gone in {:?}", start.elapsed());
    assert!(made < Duration::from_secs(10));
    for (holder, inode) in names {
        assert!(!process_exists(holder), "holder {holder} is still there");
        assert!(!network_is_held(inode), "namespace {inode} is still there, although only values are left");
    }
    assert!(hosts[0].shell("true").unwrap_err().to_string().contains("the lab of cloud-1 is gone"));
}

#[test]
fn a_panic_takes_everything_along() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let output = tempfile::NamedTempFile::new().unwrap();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let lab = Lab::new().unwrap();
        let host = lab.public_site("site").host("one").unwrap();
        // Forked twice and in the background: no longer our child.
        host.shell("setsid sleep 1000 >/dev/null 2>&1 & echo $! > /run/wireguard/pid").unwrap();
        let orphan: u32 = host.shell("cat /run/wireguard/pid").unwrap().trim().parse().unwrap();
        let process = host.spawn(Command::new("sleep").arg("1000"), output.path()).unwrap();
        assert!(process_exists(orphan) && process_exists(process.id()));
        sender.send((host.holder_pid(), host.network_inode(), orphan, process.id())).unwrap();
        std::panic::resume_unwind(Box::new("on purpose"));
    }));
    assert!(result.is_err());
    let (holder, inode, orphan, process) = receiver.recv().unwrap();
    for id in [holder, process] {
        assert!(!process_exists(id));
    }
    wait_until("the orphan is reaped", || !process_exists(orphan));
    assert!(!network_is_held(inode));
}

/// Not a test by itself: the owner that the next test kills.
#[test]
#[ignore = "started by killing_the_owner_takes_everything_along: cargo xtask test lab -- killing_the_owner"]
fn owner_to_be_killed() {
    let lab = Lab::new().unwrap();
    let host = lab.nat_site("site", Nat::FullCone, lan("10.0.0.0/24")).unwrap().host("one").unwrap();
    let output = tempfile::NamedTempFile::new().unwrap();
    let process = host.spawn(Command::new("sleep").arg("1000"), output.path()).unwrap();
    println!("OWNER {} {} {}", host.holder_pid(), process.id(), host.network_inode());
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn killing_the_owner_takes_everything_along() {
    let mut owner = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "life::owner_to_be_killed", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(owner.stdout.take().unwrap()).lines();
    let line =
        lines.map(Result::unwrap).find_map(|line| line.split_once("OWNER ").map(|(_, rest)| rest.to_owned()));
    let numbers: Vec<u64> = line.unwrap().split(' ').map(|word| word.parse().unwrap()).collect();
    let [holder, process] = [numbers[0], numbers[1]].map(|number| u32::try_from(number).unwrap());
    assert!(process_exists(holder) && process_exists(process) && network_is_held(numbers[2]));
    owner.kill().unwrap();
    owner.wait().unwrap();
    wait_until("holder and process end", || !process_exists(holder) && !process_exists(process));
    wait_until("the namespace ends", || !network_is_held(numbers[2]));
}

#[test]
fn two_labs_side_by_side_do_not_meet() {
    let labs = [Lab::new().unwrap(), Lab::new().unwrap()];
    let hosts = labs.each_ref().map(three_sites);
    assert_eq!(hosts[0][0].address(), hosts[1][0].address(), "the same addresses in both");
    let observers = hosts.each_ref().map(|all| socket(&all[0], 4000));
    socket(&hosts[0][3], 5000).send_to(b"first lab", at(hosts[0][0].address(), 4000)).unwrap();
    assert_eq!(receive(&observers[0], common::TIMEOUT).unwrap().0, "first lab");
    assert!(receive(&observers[1], common::SILENCE).is_none());
    let [first, second] = labs;
    drop(first);
    let source =
        seen(&socket(&hosts[1][3], 5000), &observers[1], at(hosts[1][0].address(), 4000), common::TIMEOUT);
    assert!(source.is_some(), "the other lab goes on");
    drop(second);
}

#[test]
fn one_lan_range_serves_two_sites() {
    let lab = Lab::new().unwrap();
    let hosts = three_sites(&lab);
    let (home, office) = (&hosts[2], &hosts[4]);
    assert_eq!(home.address(), office.address());
    assert_ne!(home.public_address(), office.public_address());
    // A neighbour answers within the site; the other site's host with that address does not get it.
    let neighbour = socket(&hosts[3], 6000);
    let far = socket(&hosts[5], 6000);
    socket(home, 6001).send_to(b"neighbour", at(hosts[3].address(), 6000)).unwrap();
    assert_eq!(receive(&neighbour, common::TIMEOUT).unwrap().1, at(home.address(), 6001));
    assert!(receive(&far, common::SILENCE).is_none());
}

#[test]
fn every_host_has_its_own_wireguard_directory_name_and_sysfs() {
    let lab = Lab::new().unwrap();
    let site = lab.public_site("site");
    let hosts = ["one", "two"].map(|name| site.host(name).unwrap());
    hosts[0].shell("touch /var/run/wireguard/wg0.sock").unwrap();
    assert_eq!(hosts[0].shell("ls /run/wireguard; hostname").unwrap(), "wg0.sock\none\n");
    assert_eq!(hosts[1].shell("ls /run/wireguard; hostname").unwrap(), "two\n");
    assert!(!Path::new("/run/wireguard/wg0.sock").exists(), "nothing leaks to the machine");
    assert_eq!(hosts[0].shell("ls /sys/class/net").unwrap(), "eth0\nlo\n");
    assert_eq!(lab.bare_namespace("pod").unwrap().shell("ls /sys/class/net").unwrap(), "lo\n");
    hosts[0].mount_private("/run/testbed-lab-private").unwrap();
    hosts[0].shell("touch /run/testbed-lab-private/mine").unwrap();
    assert_eq!(hosts[1].shell("ls /run/testbed-lab-private").unwrap(), "");
    fs::remove_dir("/run/testbed-lab-private").unwrap_or_default();
}

#[test]
fn a_namespace_can_be_used_by_path_by_command_and_by_thread() {
    let lab = Lab::new().unwrap();
    let pod: Namespace = lab.bare_namespace("pod").unwrap();
    let inode = pod.network_inode();
    assert_eq!(fs::metadata(pod.netns_path()).unwrap().ino(), inode);
    let entered = Command::new("sh")
        .args(["-c", &format!("{} readlink /proc/self/ns/net", pod.enter_command())])
        .output();
    assert_eq!(String::from_utf8_lossy(&entered.unwrap().stdout), format!("net:[{inode}]\n"));
    let here = std::env::current_dir().unwrap();
    let inside = pod
        .run(|| (fs::metadata("/proc/thread-self/ns/net").unwrap().ino(), std::env::current_dir().unwrap()));
    assert_eq!(inside.unwrap(), (inode, here.clone()), "the working directory stays");
    let directory = pod.command("pwd").unwrap().output().unwrap();
    assert_eq!(String::from_utf8_lossy(&directory.stdout).trim(), here.to_str().unwrap());
    let pid_of_caller = fs::metadata("/proc/thread-self/ns/net").unwrap().ino();
    assert_ne!(pid_of_caller, inode, "the caller stays outside");
}

#[test]
fn a_panic_inside_goes_on_outside() {
    let lab = Lab::new().unwrap();
    let pod = lab.bare_namespace("pod").unwrap();
    let panic =
        std::panic::catch_unwind(|| pod.run(|| std::panic::resume_unwind(Box::new("inside")))).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"inside"));
}

#[test]
fn a_process_writes_to_its_file_and_stops() {
    let lab = Lab::new().unwrap();
    let pod = lab.bare_namespace("pod").unwrap();
    let output = tempfile::NamedTempFile::new().unwrap();
    let mut command = pod.command("sh").unwrap();
    command.args(["-c", "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.05; done"]);
    let mut process = pod.spawn(&mut command, output.path()).unwrap();
    process.wait_for_output("ready", common::TIMEOUT).unwrap();
    assert!(process.status().unwrap().is_none());
    assert_eq!(process.stop(common::TIMEOUT).unwrap().code(), Some(3));
    assert!(fs::read_to_string(output.path()).unwrap().ends_with("bye\n"));

    let mut short =
        pod.spawn(Command::new("sh").args(["-c", "echo oh no >&2; exit 1"]), output.path()).unwrap();
    let error = short.wait_for_output("ready", common::TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("oh no") && error.contains("exit status: 1"), "{error}");
}

#[test]
fn mistakes_are_told() {
    let lab = Lab::new().unwrap();
    let site = lab.nat_site("site", Nat::PortRestricted, lan("192.168.1.0/24")).unwrap();
    let host = site.host("one").unwrap();
    let error = host.shell("echo the reason >&2; false; echo not reached").unwrap_err().to_string();
    assert!(error.contains("the reason") && error.contains("one"), "{error}");
    let at_address =
        |text: &str| testbed_lab::HostOptions { address: Some(text.parse().unwrap()), mtu: None };
    for (address, reason) in
        [("192.168.1.10", "taken"), ("192.168.2.1", "no host address"), ("192.168.1.1", "no host address")]
    {
        let error = format!("{:#}", site.host_with("two", &at_address(address)).unwrap_err());
        assert!(error.contains(reason) && error.contains(address), "{error}");
    }
    assert!(lab.bare_namespace("no/name").unwrap_err().to_string().contains("no/name"));
    let one_to_one = lab.nat_site("other", Nat::OneToOne, lan("10.0.0.0/24")).unwrap();
    assert!(one_to_one.router().rebind().unwrap_err().to_string().contains("change_address"));
}
