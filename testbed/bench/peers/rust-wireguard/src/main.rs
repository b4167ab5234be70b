//! `rust-wireguard-bench gotatun|boringtun INTERFACE` is the device of that crate, as it is published and with the settings of the crate's
//! own program, until it is killed. `wg(8)` configures it.

use anyhow::{Result, anyhow, bail};
use boringtun::device::{DeviceConfig, DeviceHandle};
use gotatun::device::uapi::UapiServer;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match *arguments.as_slice() {
        ["boringtun", interface] => run_boringtun(interface),
        ["gotatun", interface] => run_gotatun(interface),
        _ => bail!("usage: rust-wireguard-bench gotatun|boringtun INTERFACE"),
    }
}

fn run_boringtun(interface: &str) -> Result<()> {
    DeviceHandle::new(interface, DeviceConfig::default())?.wait();
    bail!("the device of boringtun ended")
}

#[tokio::main]
async fn run_gotatun(interface: &str) -> Result<()> {
    let control =
        UapiServer::default_unix_socket(interface, None, None).map_err(|error| anyhow!("{error:#}"))?;
    let device = gotatun::device::build().with_default_udp().with_uapi(control).create_tun(interface)?;
    device.build().await?.wait().await;
    bail!("the device of gotatun ended")
}
