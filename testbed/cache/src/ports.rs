//! Ports for programs that test beds start.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::bail;

/// A TCP port of the loopback interface that is free now. It is below the range that the kernel gives to outgoing connections and to
/// listeners without a port: no other program has it by chance before the one it is for begins, or while that is restarted.
///
/// # Errors
/// No port is free, or the loopback interface is down.
pub fn free_port() -> anyhow::Result<u16> {
    for _ in 0..200 {
        let port = rand::random_range(15_000..30_000);
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no free TCP port on 127.0.0.1 in 200 tries (is its loopback interface up?)")
}
