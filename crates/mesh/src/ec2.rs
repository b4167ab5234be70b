//! Asks the metadata service of EC2 which public address is translated to this node's own.
//!
//! Elsewhere nothing is asked. What was learned stays while the service does not answer: a wrong address costs peers a few probes.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use fairlead_cluster::subsystem::Subsystem;
use fairlead_dataplane::kernel_watch::{KernelChanges, KernelWatch};
use fairlead_port_mapping::ec2;
use tokio::sync::watch;
use tokio::time::sleep;

use super::port_mapping;

/// An address can be associated and taken away while the instance runs, which no interface shows.
const INTERVAL: Duration = Duration::from_secs(300);
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Least pause, whatever happens to links and addresses.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// Starts to ask, and to keep the address current.
pub(crate) fn start(kernel: &KernelWatch, subsystem: &mut Subsystem) -> watch::Receiver<Option<Ipv4Addr>> {
    let (found, address) = watch::channel(None);
    subsystem.spawn("EC2 metadata", run(kernel.subscribe(port_mapping::concerns), found));
    address
}

/// Runs until it is dropped.
async fn run(mut kernel: KernelChanges, found: watch::Sender<Option<Ipv4Addr>>) {
    if !ec2::is_instance(Path::new("/sys")) {
        return std::future::pending().await;
    }
    loop {
        let pause = match ec2::public_ipv4(ec2::SERVICE).await {
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

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::thread;
    use std::time::Instant;

    use fairlead_cluster::subsystem::Supervisor;
    use testbed_netns::Namespace;

    use super::*;

    /// The metadata service is a fake; what it is sent is tested in `fairlead-port-mapping`.
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
        let listener = namespace.run(|| TcpListener::bind(ec2::SERVICE).unwrap());
        thread::spawn(move || serve(&listener));
        let began = Instant::now();
        let address = namespace.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (kernel, mut supervisor) = (KernelWatch::default(), Supervisor::default());
                let mut address = start(&kernel, supervisor.subsystem("mesh"));
                let told = tokio::time::timeout(RETRY_INTERVAL, address.wait_for(Option::is_some)).await;
                *told.unwrap().unwrap()
            })
        });
        assert_eq!(address, Some([198, 51, 100, 7].into()), "after {:?}", began.elapsed());
    }
}
