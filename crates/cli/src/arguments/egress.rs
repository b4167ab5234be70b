//! Arguments of `fairlead egress`.

use std::net::IpAddr;

use clap::{Args, Subcommand};
use fairlead_api::names::{is_dns_label, is_object_name};

use super::value_parsers::at;
use crate::api::ApiArguments;
use crate::output::Output;

/// Subcommands of `fairlead egress`.
#[derive(Debug, Subcommand)]
pub enum EgressCommand {
    /// Say which way packets of a pod to an address take: by eth0, to the gateways of an Egress, or nowhere
    #[command(
        after_help = "It follows the rules and routes that the node program sets in the pod, as it plans them from the objects that the API \
        server has: the pod's annotations, Egresses, Services, EndpointSlices, AddressPools, ServiceCIDRs, Nodes. What may not be read is \
        named. It does not ask the node: whether gateways have registered the pod is told by its Events, which are shown.\n\n\
        Exit codes: 0 there is a way, 1 packets are refused, the way is not known, or the query failed, 2 invalid arguments."
    )]
    Explain(EgressExplain),
    /// Show Egresses; with a name its gateways and client pods, and what is wrong with them
    #[command(
        after_help = "CLIENTS are the pods whose annotation egress.coil.cybozu.com/NAMESPACE names the Egress. What may not be read is \
        named, and shown as a question mark.\n\nExit codes: 0 no problem, 1 query failed, 2 invalid arguments, 3 an Egress is not ready or, \
        with a name, a client pod has a problem."
    )]
    Status(EgressStatusArguments),
    /// Say which pod used an address and port outside: all gateways are asked which connections had it as their source
    #[command(
        after_help = "Gateways remember the last 65,536 connections as long as their program runs; with spec.logConnections they also write them to \
        their logs. Asking one takes the right to `get` pods/proxy, and to list pods. A gateway that cannot be asked is named.\n\n\
        Exit codes: 0 found, 1 query failed, 2 invalid arguments, 3 no gateway that could be asked knows such a connection."
    )]
    Who(EgressWho),
}

/// Arguments of `fairlead egress who`.
#[derive(Debug, Args)]
pub struct EgressWho {
    /// The source address that was seen outside
    #[arg(value_name = "ADDRESS")]
    pub(crate) address: IpAddr,
    /// The source port that was seen outside; for ICMP, the identifier of echo requests
    #[arg(value_name = "PORT")]
    pub(crate) port: u16,
    /// Time at which it was seen, as in 2026-01-31T12:00:00Z; without it, all connections that are known are shown
    #[arg(long, value_name = "TIME", value_parser = at)]
    pub(crate) at: Option<jiff::Timestamp>,
    /// Ask the gateways of this Egress alone
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = qualified)]
    pub(crate) egress: Option<Qualified>,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

/// Arguments of `fairlead egress explain`.
#[derive(Debug, Args)]
pub struct EgressExplain {
    /// The pod
    #[arg(value_name = "NAMESPACE/POD", value_parser = qualified)]
    pub(crate) pod: Qualified,
    /// The address that it sends to
    #[arg(value_name = "DESTINATION")]
    pub(crate) destination: IpAddr,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

/// Arguments of `fairlead egress status`.
#[derive(Debug, Args)]
pub struct EgressStatusArguments {
    /// Show this Egress alone, with its gateways and client pods
    #[arg(value_name = "NAMESPACE/NAME", value_parser = qualified)]
    pub(crate) egress: Option<Qualified>,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

/// An object of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Qualified {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

fn qualified(text: &str) -> Result<Qualified, String> {
    match text.split_once('/') {
        Some((namespace, name)) if is_dns_label(namespace) && is_object_name(name) => {
            Ok(Qualified { namespace: namespace.to_owned(), name: name.to_owned() })
        }
        _ => Err("must be NAMESPACE/NAME".to_owned()),
    }
}
