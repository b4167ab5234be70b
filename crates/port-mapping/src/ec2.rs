//! The public IPv4 address that EC2 translates to an instance's own, which none of its interfaces shows: what the Instance Metadata
//! Service says. Elsewhere, 169.254.169.254 may be anything, so the firmware has to say first that this is EC2.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use fairlead_address::{is_private, is_reachable};
use fairlead_dataplane::kernel_watch::KernelChanges;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::codec::imds::{self, InvalidResponse, MAX_RESPONSE};

/// The service, on every instance.
pub const SERVICE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)), 80);
/// Longest query, with its token.
const TIMEOUT: Duration = Duration::from_secs(3);
/// An address can be associated and taken away while the instance runs, which no interface shows.
const INTERVAL: Duration = Duration::from_secs(300);
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Least pause, whatever happens to links and addresses.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// Keeps the public address of this node current, until it is dropped. Elsewhere nothing is asked. An address that was learned stays
/// while the service does not answer: a wrong one costs peers a few probes.
pub async fn follow(mut kernel: KernelChanges, found: watch::Sender<Option<Ipv4Addr>>) {
    if !is_instance(Path::new("/sys")) {
        return std::future::pending().await;
    }
    loop {
        let pause = match public_ipv4(SERVICE).await {
            Ok(address) => {
                let is_news = |known: &mut Option<Ipv4Addr>| std::mem::replace(known, address) != address;
                if found.send_if_modified(is_news) {
                    tracing::info!(?address, "the metadata service of EC2 has another public address");
                }
                INTERVAL
            }
            Err(error) => {
                tracing::debug!(%error, "cannot ask the metadata service of EC2");
                RETRY_INTERVAL
            }
        };
        sleep(MIN_PAUSE).await;
        tokio::select! {
            () = sleep(pause) => {}
            () = kernel.changed() => {}
        }
    }
}

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
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::thread;
    use std::time::Instant;

    use fairlead_dataplane::kernel_watch::KernelWatch;
    use testbed_netns::Namespace;

    use super::*;
    use crate::task::concerns;

    /// The metadata service is a fake; what it is sent is tested in `tests/integration/ec2.rs`.
    fn serve(listener: &TcpListener) {
        for body in ["AQAEAP==", "198.51.100.7"] {
            let (mut stream, _) = listener.accept().unwrap();
            assert_ne!(stream.read(&mut [0; 4096]).unwrap(), 0);
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        }
    }

    #[test]
    fn an_instance_of_ec2_asks_for_its_public_address_from_the_start() {
        let namespace = Namespace::with_own("/sys");
        namespace.sh(
            "ip addr add 169.254.169.254/32 dev lo; mkdir /sys/hypervisor; echo ec2a1b2c-0 > /sys/hypervisor/uuid",
        );
        let listener = namespace.run(|| TcpListener::bind(SERVICE).unwrap());
        thread::spawn(move || serve(&listener));
        let began = Instant::now();
        let address = namespace.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (found, mut address) = watch::channel(None);
                tokio::spawn(follow(KernelWatch::default().subscribe(concerns), found));
                let told = tokio::time::timeout(RETRY_INTERVAL, address.wait_for(Option::is_some)).await;
                *told.unwrap().unwrap()
            })
        });
        assert_eq!(address, Some([198, 51, 100, 7].into()), "after {:?}", began.elapsed());
    }

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
