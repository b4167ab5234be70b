//! The public IPv4 address that EC2 translates to an instance's own, which none of its interfaces shows: what the Instance Metadata
//! Service says. Elsewhere, 169.254.169.254 may be anything, so the firmware has to say first that this is EC2.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use fairlead_address::{is_private, is_reachable};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::codec::imds::{self, InvalidResponse, MAX_RESPONSE};

/// The service, on every instance.
pub const SERVICE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)), 80);
/// Longest query, with its token.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Whether the firmware says that this host is an instance of EC2 ("Detect whether a host is an EC2 instance", Amazon EC2 User Guide):
/// `sys` is the mount point of sysfs.
pub fn is_instance(sys: &Path) -> bool {
    let read =
        |file: &str| fs::read_to_string(sys.join(file)).unwrap_or_default().trim().to_ascii_lowercase();
    read("class/dmi/id/sys_vendor") == "amazon ec2"
        || read("class/dmi/id/product_uuid").starts_with("ec2")
        || read("hypervisor/uuid").starts_with("ec2")
}

/// Asks the service for the public address; `None` where the instance has none.
///
/// # Errors
/// It does not answer within three seconds, or with something else.
pub async fn public_ipv4(service: SocketAddr) -> io::Result<Option<Ipv4Addr>> {
    let query = async {
        let token = imds::parse_token(&exchange(service, &imds::token_request()).await?).map_err(invalid)?;
        let response = exchange(service, &imds::public_ipv4_request(&token)).await?;
        match imds::parse_public_ipv4(&response) {
            Ok(address) if is_reachable(address.into()) && !is_private(address.into()) => Ok(Some(address)),
            Ok(address) => {
                Err(io::Error::other(format!("the metadata service names {address}, which is not public")))
            }
            Err(InvalidResponse::Status(404)) => Ok(None),
            Err(error) => Err(invalid(error)),
        }
    };
    timeout(TIMEOUT, query).await?
}

/// One request on a connection of its own, which the service closes.
async fn exchange(service: SocketAddr, request: &str) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(service).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut response = Vec::new();
    stream.take(MAX_RESPONSE as u64).read_to_end(&mut response).await?;
    Ok(response)
}

fn invalid(error: InvalidResponse) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the metadata service: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_firmware_says_whether_this_is_ec2() {
        for (file, content, is_ec2) in [
            ("class/dmi/id/sys_vendor", "Amazon EC2\n", true),
            ("class/dmi/id/sys_vendor", "QEMU\n", false),
            ("class/dmi/id/product_uuid", "EC2A1B2C-0000-0000-0000-000000000000\n", true),
            ("hypervisor/uuid", "ec2a1b2c-0000-0000-0000-000000000000\n", true),
            ("hypervisor/uuid", "00000000-0000-0000-0000-000000000000\n", false),
        ] {
            let sys = tempfile::tempdir().unwrap();
            assert!(!is_instance(sys.path()));
            fs::create_dir_all(sys.path().join(file).parent().unwrap()).unwrap();
            fs::write(sys.path().join(file), content).unwrap();
            assert_eq!(is_instance(sys.path()), is_ec2, "{file}: {content}");
        }
    }
}
