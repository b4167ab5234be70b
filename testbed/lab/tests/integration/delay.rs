//! A longer way between sites, for as long as a test wants it.

use std::net::{IpAddr, UdpSocket};
use std::time::{Duration, Instant};

use testbed_lab::{Host, Lab, Nat, SlowLink};

/// The round-trip times of some pings, in milliseconds.
fn round_trips(from: &Host, to: IpAddr) -> Vec<f64> {
    let output = from.shell(&format!("ping -n -c 5 -i 0.05 -W 2 {to}")).unwrap();
    let times = output.lines().filter_map(|line| line.split_once("time=")?.1.strip_suffix(" ms"));
    times.map(|time| time.parse().unwrap()).collect()
}

#[test]
fn packets_between_sites_take_longer_in_both_families_until_that_is_over() {
    let lab = Lab::new().unwrap();
    let site = lab.dual_stack_site("cloud");
    let (one, other) = (site.host("one").unwrap(), lab.dual_stack_site("elsewhere").host("other").unwrap());
    let home = lab.nat_site("home", Nat::PortRestricted, "192.168.1.0/24".parse().unwrap()).unwrap();
    let inside = home.host("inside").unwrap();
    let targets = [IpAddr::from(other.address()), IpAddr::from(other.address6().unwrap())];
    let delay = lab.delay(Duration::from_millis(40)).unwrap();
    let delayed = targets.into_iter().flat_map(|target| round_trips(&one, target));
    let delayed: Vec<f64> = delayed.chain(round_trips(&inside, targets[0])).collect();
    assert_eq!(delayed.len(), 15);
    assert!(delayed.iter().all(|time| *time >= 80.0), "{delayed:?}");
    drop(delay);
    let direct: Vec<f64> = targets.into_iter().flat_map(|target| round_trips(&one, target)).collect();
    // On a machine that is busy some may take longer.
    assert!(direct.len() == 10 && direct.iter().any(|time| *time < 40.0), "{direct:?}");
}

/// Sends so many datagrams of 1,000 bytes of payload at once; how many arrive until there are no more, and in what time.
fn burst(from: &Host, to: &Host, count: usize) -> (usize, Duration) {
    let receiver = to.run(|| UdpSocket::bind((to.address(), 0))).unwrap().unwrap();
    let sender = from.run(|| UdpSocket::bind((from.address(), 0))).unwrap().unwrap();
    receiver.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let (began, mut last, mut arrived) = (Instant::now(), Duration::ZERO, 0);
    for _ in 0..count {
        sender.send_to(&[0; 1000], receiver.local_addr().unwrap()).unwrap();
    }
    while receiver.recv(&mut [0; 1000]).is_ok() {
        (arrived, last) = (arrived + 1, began.elapsed());
    }
    (arrived, last)
}

#[test]
fn a_slow_link_passes_what_its_rate_and_its_queue_allow() {
    let lab = Lab::new().unwrap();
    let [slow, one, other] =
        ["slow", "one", "other"].map(|name| lab.public_site("cloud").host(name).unwrap());
    // 50 datagrams may wait; to send them takes 411 ms.
    let link =
        SlowLink { address: slow.address().into(), bits_per_second: 1_000_000, queue_bytes: 50 * 1028 };
    let _slow = lab.delay_with(Duration::ZERO, &[link]).unwrap();
    for (from, to) in [(&slow, &one), (&one, &slow)] {
        let (arrived, took) = burst(from, to, 100);
        println!("{} to {}: {arrived} of 100 in {took:?}", from.name(), to.name());
        // Some more if the burst itself takes long on a machine that is busy.
        assert!((51..100).contains(&arrived), "{arrived}");
        assert!(took >= Duration::from_millis(400), "{took:?}");
    }
    // As many as a socket holds.
    assert_eq!(burst(&one, &other, 60).0, 60);
}
