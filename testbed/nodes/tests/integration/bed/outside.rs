//! A machine outside of the cluster, whose servers tell clients which address they come from.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed_lab::{Host, Place};

/// TCP and UDP port of the servers.
pub(crate) const PORT: u16 = 7000;
/// Longest wait for an answer on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// Starts servers at these addresses: by TCP they tell the client's address as the first line, after which everything is echoed; by UDP as
/// the answer.
pub(crate) fn serve(host: &Host, addresses: impl IntoIterator<Item = IpAddr>) -> Result<()> {
    for address in addresses {
        let (tcp, udp) = host.inside(|| -> Result<_> {
            Ok((TcpListener::bind((address, PORT))?, UdpSocket::bind((address, PORT))?))
        })??;
        std::thread::spawn(move || serve_tcp(&tcp));
        std::thread::spawn(move || serve_udp(&udp));
    }
    Ok(())
}

/// Public addresses of a host, IPv4 first.
pub(crate) fn addresses_of(host: &Host) -> Vec<IpAddr> {
    std::iter::once(IpAddr::from(host.address())).chain(host.address6().map(IpAddr::from)).collect()
}

/// Serves TCP until the test program ends.
fn serve_tcp(listener: &TcpListener) {
    while let Ok((connection, from)) = listener.accept() {
        std::thread::spawn(move || echo(connection, from));
    }
}

fn echo(mut connection: TcpStream, from: SocketAddr) {
    let _ = connection.set_nonblocking(false);
    let _ = connection.set_nodelay(true);
    let mut buffer = vec![0; 1 << 16];
    let mut outcome = writeln!(connection, "{}", from.ip());
    while outcome.is_ok() {
        match connection.read(&mut buffer) {
            // `curl` wants to see an end.
            Ok(4..) if buffer.starts_with(b"GET ") => return,
            Ok(length @ 1..) => outcome = connection.write_all(buffer.get(..length).unwrap_or_default()),
            _ => return,
        }
    }
}

/// Serves UDP until the test program ends.
fn serve_udp(socket: &UdpSocket) {
    let mut buffer = [0; 64];
    loop {
        // A refused answer is reported at the next call.
        if let Ok((_, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(from.ip().to_string().as_bytes(), from);
        }
    }
}

/// A connection to a server outside, and the address that the server sees.
pub(crate) fn connect(from: &impl Place, to: IpAddr) -> Result<(TcpStream, IpAddr)> {
    let target = SocketAddr::from((to, PORT));
    let connection = from.inside(|| TcpStream::connect_timeout(&target, PATIENCE))??;
    connection.set_read_timeout(Some(PATIENCE))?;
    connection.set_nodelay(true)?;
    let mut line = String::new();
    let mut byte = [0];
    let mut reader = connection.try_clone()?;
    while byte != *b"\n" {
        reader.read_exact(&mut byte)?;
        line.extend(byte.map(char::from));
    }
    let seen = line.trim().parse().with_context(|| format!("the server wrote {line:?}"))?;
    Ok((connection, seen))
}

/// The address that the UDP server outside sees.
pub(crate) fn ask_by_udp(from: &impl Place, to: IpAddr) -> Result<IpAddr> {
    let any = if to.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = from.inside(|| UdpSocket::bind((any, 0)))??;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send_to(b"who am I", (to, PORT))?;
    let mut buffer = [0; 64];
    let (length, _) = socket.recv_from(&mut buffer)?;
    Ok(std::str::from_utf8(buffer.get(..length).unwrap_or_default())?.parse()?)
}

/// Sends bytes and reads them back.
pub(crate) fn echoed(connection: &mut TcpStream, bytes: &[u8]) -> Result<()> {
    let mut writer = connection.try_clone()?;
    let mut answer = vec![0; bytes.len()];
    std::thread::scope(|scope| {
        let writing = scope.spawn(move || writer.write_all(bytes));
        connection.read_exact(&mut answer)?;
        writing.join().map_err(|_| anyhow::anyhow!("panicked"))??;
        ensure!(answer == bytes, "the echo is another");
        Ok(())
    })
}

/// Runs a shell script in a network namespace.
pub(crate) fn run(place: &impl Place, script: &str) -> Result<String> {
    let output = place.inside(|| Command::new("sh").args(["-c", script]).output())??;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{script}: {text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(text)
}
