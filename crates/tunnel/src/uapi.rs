//! The control socket of userspace WireGuard devices, as `wg(8)` speaks it.
//!
//! <https://www.wireguard.com/xplatform/#configuration-protocol>

mod request;
mod response;
mod server;

pub(crate) use server::Server;

/// Parses one request and shows it, with the change it makes to an empty device.
pub(crate) fn parse(text: &str) -> Result<String, String> {
    let empty = fairlead_keys::DeviceState {
        private_key: None,
        listen_port: 0,
        fwmark: 0,
        peers: Default::default(),
    };
    match request::parse(text).map_err(|error| error.to_string())? {
        request::Request::Get => Ok(response::describe(&empty)),
        request::Request::Set(set) => Ok(format!("{:?}", set.change(&empty))),
    }
}
