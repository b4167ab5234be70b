//! `fairlead-cni`: reads the environment and standard input, calls the node program, prints one JSON object.
//!
//! Results and errors go to standard output, as the CNI specification requires, and log lines to standard error. All
//! decisions are in the library beside this file.

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use fairlead_cni_plugin::env::{self, Attachment, AttachmentOperation, Invocation, NetworkOperation};
use fairlead_cni_plugin::failure::{Failure, code};
use fairlead_cni_plugin::netconf::{self, NetConf, Previous};
use fairlead_cni_plugin::result::{self, CniResult};
use fairlead_cni_plugin::version::{self, SpecVersion};
use fairlead_cni_plugin::{attached, daemon, pending, repeatable, request};
use fairlead_wire::network::GcRequest;

/// Runtimes call STATUS every few seconds: a late answer is of no use.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let outcome = run().map_err(|failure| match env::is_del(|name| std::env::var_os(name)) {
        true => repeatable::error_of_del(failure),
        false => failure,
    });
    let (output, exit) = match outcome {
        Ok(output) => (output, ExitCode::SUCCESS),
        Err(failure) => (failure.to_json(), ExitCode::FAILURE),
    };
    match print(&output) {
        Ok(()) => exit,
        Err(error) => {
            log(&format!("standard output: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<String, Failure> {
    match env::parse(|name| std::env::var_os(name))? {
        Invocation::About => {
            log(
                "the CNI plugin of Fairlead, for container runtimes; the command line for people is `fairlead`.",
            );
            log(&format!("CNI protocol versions supported: {}", SpecVersion::list()));
            Ok(String::new())
        }
        Invocation::Attachment(operation, attachment) => {
            let stdin = read_stdin()?;
            let conf = netconf::parse(&stdin)?;
            attach(operation, attachment, &conf, stdin).map_err(|failure| failure.in_version(conf.version))
        }
        Invocation::Network(operation) => {
            let conf = netconf::parse(&read_stdin()?)?;
            network(operation, &conf).map_err(|failure| failure.in_version(conf.version))
        }
        Invocation::Version => Ok(version::answer()),
    }
}

fn attach(
    operation: AttachmentOperation,
    attachment: Attachment,
    conf: &NetConf,
    stdin: Vec<u8>,
) -> Result<String, Failure> {
    match operation {
        AttachmentOperation::Add => {
            refuse_own_namespace(&attachment)?;
            let request = request::build(operation, attachment, conf, stdin)?;
            let answer = block_on(daemon::add(&conf.socket, request, daemon::TIMEOUT))?;
            let previous = match &conf.previous {
                Previous::Result(previous) => Some(previous),
                Previous::None | Previous::Unusable(_) => None,
            };
            Ok(result::of_add(previous, CniResult::of_answer(&answer)?).to_json(conf.version))
        }
        AttachmentOperation::Check => {
            if conf.version < SpecVersion::V0_4_0 {
                return Err(needs_newer("CHECK", SpecVersion::V0_4_0, conf.version));
            }
            refuse_own_namespace(&attachment)?;
            let request = request::build(operation, attachment, conf, stdin)?;
            block_on(daemon::check(&conf.socket, request, daemon::TIMEOUT))?;
            Ok(String::new())
        }
        AttachmentOperation::Del => {
            if let Previous::Unusable(reason) = &conf.previous {
                log(&format!("DEL ignores prevResult, which cannot be decoded: {reason}"));
            }
            let (container_id, ifname) = (attachment.container_id.clone(), attachment.ifname.clone());
            let request = request::build(operation, attachment, conf, stdin)?;
            match block_on(daemon::del(&conf.socket, request, daemon::TIMEOUT)) {
                Ok(()) => Ok(String::new()),
                Err(failure) if failure.code == code::TRY_AGAIN_LATER => {
                    leave_for_later(&conf.socket, &container_id, &ifname, failure)
                }
                Err(failure) => Err(failure),
            }
        }
    }
}

fn leave_for_later(
    socket: &str,
    container_id: &str,
    ifname: &str,
    failure: Failure,
) -> Result<String, Failure> {
    match pending::write(socket, container_id, ifname) {
        Ok(()) => {
            log(&format!("DEL of {container_id} is left for the node program to finish: {failure}"));
            Ok(String::new())
        }
        Err(error) => {
            log(&format!(
                "DEL of {container_id} cannot be left for the node program beside {socket}: {error}"
            ));
            Err(failure)
        }
    }
}

fn network(operation: NetworkOperation, conf: &NetConf) -> Result<String, Failure> {
    if conf.version < SpecVersion::V1_1_0 {
        return Err(needs_newer(operation.as_str(), SpecVersion::V1_1_0, conf.version));
    }
    match operation {
        NetworkOperation::Gc => {
            let valid = netconf::valid_attachments(conf)?;
            let request = GcRequest { network: conf.name.clone(), valid };
            let done = block_on(daemon::gc(&conf.socket, request, daemon::TIMEOUT))?;
            for freed in &done.freed {
                log(&format!("GC freed interface {} of container {}", freed.ifname, freed.container_id));
            }
            if done.failures.is_empty() {
                return Ok(String::new());
            }
            let msg =
                format!("{} attachments of network {} could not be freed", done.failures.len(), conf.name);
            Err(Failure::new(code::IO, msg, done.failures.join("; ")))
        }
        NetworkOperation::Status => status(&conf.socket),
    }
}

/// Runtimes report a failure as a node that is not ready, and the cluster then evicts the pods that run there.
fn status(socket: &str) -> Result<String, Failure> {
    match block_on(daemon::status(socket, STATUS_TIMEOUT)) {
        Ok(()) => Ok(String::new()),
        Err(failure) if attached::any(Path::new(socket)) => {
            log(&format!("STATUS is no error because pods are attached, but no other can be now: {failure}"));
            Ok(String::new())
        }
        Err(failure) => Err(failure),
    }
}

/// One call needs one thread.
fn block_on<T>(call: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::new(code::INTERNAL, format!("cannot start the event loop: {error}"), ""))?
        .block_on(call)
}

/// A pod attached in the node's own namespace would take over the node's network.
fn refuse_own_namespace(attachment: &Attachment) -> Result<(), Failure> {
    let identity = |path: &str| std::fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
    // A path that cannot be read is not our own namespace; the node program returns the error.
    let container = identity(&attachment.netns);
    if attachment.netns_override || container.is_none() || container != identity("/proc/thread-self/ns/net") {
        return Ok(());
    }
    Err(Failure::new(
        code::NETWORK_NAMESPACE,
        format!("CNI_NETNS {} is the plugin's own network namespace", attachment.netns),
        "the runtime must pass the container's namespace; CNI_NETNS_OVERRIDE=1 allows this one",
    ))
}

fn needs_newer(operation: &str, minimum: SpecVersion, version: SpecVersion) -> Failure {
    let msg = format!(
        "{operation} needs cniVersion {}, the network configuration has {}",
        minimum.as_str(),
        version.as_str()
    );
    Failure::new(code::INCOMPATIBLE_VERSION, msg, format!("supported versions: {}", SpecVersion::list()))
}

fn read_stdin() -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().take(netconf::MAX_BYTES.saturating_add(1)).read_to_end(&mut bytes).map_err(
        |error| {
            Failure::new(
                code::IO,
                format!("cannot read the network configuration from standard input: {error}"),
                "",
            )
        },
    )?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length <= netconf::MAX_BYTES) {
        return Ok(bytes);
    }
    let msg =
        format!("the network configuration on standard input has more than {} bytes", netconf::MAX_BYTES);
    Err(Failure::new(code::NETWORK_CONFIG, msg, ""))
}

fn print(output: &str) -> std::io::Result<()> {
    if output.is_empty() {
        return Ok(());
    }
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(output.as_bytes())?;
    stdout.write_all(b"\n")?;
    stdout.flush()
}

/// A closed standard error is no reason to fail.
fn log(line: &str) {
    let _ = writeln!(std::io::stderr(), "fairlead-cni {}: {line}", env!("CARGO_PKG_VERSION"));
}
