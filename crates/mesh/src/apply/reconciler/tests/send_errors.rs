//! Reasons why this host cannot send to a peer.

use super::*;

#[test]
fn peers_that_are_not_up_say_why_this_host_cannot_send_to_them() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    mesh.reconcile(&three(), now).unwrap();
    let before = mesh.reconcile(&three(), now).unwrap();
    kernel.lock().unwrap().send_error = Some("sending 148 bytes to 10.0.0.2:51820: refused".to_owned());
    let report = mesh.reconcile(&three(), now).unwrap();
    for (peer, before) in report.peers.iter().zip(&before.peers) {
        assert_ne!(peer.path.state, State::Up);
        let message = &peer.path.message;
        assert!(message.starts_with(&before.path.message), "{message}");
        assert!(message.ends_with("; error: sending 148 bytes to 10.0.0.2:51820: refused"), "{message}");
    }
    assert!(before.publishes_the_same(&report), "it is no news for others");

    let mut kernel_now = kernel.lock().unwrap();
    for peer in kernel_now.state.as_mut().unwrap().peers.values_mut() {
        peer.last_handshake = Some(SystemTime::now());
        peer.rx_bytes += 1_000;
    }
    kernel_now.send_errors_read = 0;
    drop(kernel_now);
    let report = mesh.reconcile(&three(), now).unwrap();
    assert!(
        report.peers.iter().all(|peer| peer.path.state == State::Up && !peer.path.message.contains("error"))
    );
    assert_eq!(kernel.lock().unwrap().send_errors_read, 0, "those that are up are not asked");
}
