//! Reading the table of connections, and changing it.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use nix::libc;

use super::flow::{Flow, Tuple, behind_header};
use super::{
    DELETE, DESTINATION_IPV4, GET, NEW, STATUS, STATUS_MASK, STATUS_SOURCE_TRANSLATED, TUPLE_ADDRESSES,
    TUPLE_REPLY, header, message,
};
use crate::nftables::attributes::{AttributeWriter, explain};
use crate::{Error, Family, Message, Result, Socket};

/// `CTA_FILTER`, `CTA_FILTER_REPLY_FLAGS`, and the bit of the destination's address (`CTA_IP_DST` in `nf_conntrack_netlink.c`).
const FILTER: u16 = 25;
const FILTER_REPLY: u16 = 2;
const FILTER_DESTINATION: u32 = 1 << 1;

/// A socket for the table of connections of the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct ConnectionTable(Socket);

/// A change of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableChange {
    /// Adds a connection whose source is translated to what its replies are addressed to. Refused with `EEXIST` if the kernel has one with
    /// one of the tuples.
    Add(Flow),
    /// Deletes the connection with this original direction.
    Delete(Tuple),
    /// Deletes the connection with these replies.
    DeleteReply(Tuple),
    /// Sets status, TCP state, mark and timeout of the connection that has these replies. Refused with `ENOENT` if it is not.
    Update(Flow),
}

impl ConnectionTable {
    /// Opens it.
    ///
    /// # Errors
    /// Descriptors ran out.
    pub fn open() -> Result<Self> {
        Socket::open(Family::Netfilter).map(Self)
    }

    /// All connections whose source is translated to one of these addresses: replies are addressed to it. Some 250 bytes are read for each of
    /// them; of IPv6, once for each connection with a translated source, and on kernels before 5.8 so of IPv4 for each address.
    ///
    /// # Errors
    /// The kernel refuses (no `CONFIG_NF_CT_NETLINK`, no CAP_NET_ADMIN), or its answer cannot be decoded.
    pub fn translated_to(&mut self, addresses: &BTreeSet<IpAddr>) -> Result<Vec<Flow>> {
        let mut flows = Vec::new();
        for address in addresses {
            if let IpAddr::V4(ipv4) = address {
                let what = format!("list connections that are translated to {address}");
                let found = self.dump(translated_to_ipv4(*ipv4, &what)?, &what)?;
                flows.extend(found.into_iter().filter(|flow| flow.reply.destination == *address));
            }
        }
        if addresses.iter().any(IpAddr::is_ipv6) {
            let what = "list connections of IPv6 that are translated";
            // For an address, the kernel lists all but those that have it: ctnetlink_filter_match_tuple takes ipv6_addr_cmp for
            // ipv6_addr_equal.
            let mut filter = AttributeWriter::new(&header(libc::AF_INET6 as u8));
            filter.be32(STATUS, STATUS_SOURCE_TRANSLATED);
            filter.be32(STATUS_MASK, STATUS_SOURCE_TRANSLATED);
            let all = self.dump(filter.finish(what)?, what)?;
            flows.extend(all.into_iter().filter(|flow| addresses.contains(&flow.reply.destination)));
        }
        flows.retain(|flow| flow.status & STATUS_SOURCE_TRANSLATED != 0);
        Ok(flows)
    }

    /// Connections of IPv4 and IPv6 whose source is translated, to whatever address.
    ///
    /// # Errors
    /// As [`Self::translated_to`].
    pub fn translated(&mut self) -> Result<Vec<Flow>> {
        let what = "list connections that are translated";
        let mut filter = AttributeWriter::new(&header(libc::AF_UNSPEC as u8));
        filter.be32(STATUS, STATUS_SOURCE_TRANSLATED);
        filter.be32(STATUS_MASK, STATUS_SOURCE_TRANSLATED);
        let mut flows = self.dump(filter.finish(what)?, what)?;
        // Kernels before 5.15 list all of them.
        flows.retain(|flow| flow.status & STATUS_SOURCE_TRANSLATED != 0);
        Ok(flows)
    }

    /// All connections.
    ///
    /// # Errors
    /// As [`Self::translated_to`].
    pub fn all(&mut self) -> Result<Vec<Flow>> {
        self.dump(header(libc::AF_UNSPEC as u8).to_vec(), "list connections")
    }

    /// The connection with this original direction in zone 0, if there is one.
    ///
    /// # Errors
    /// As [`Self::translated_to`].
    pub fn get(&mut self, original: &Tuple) -> Result<Option<Flow>> {
        let what = "look for a connection";
        let request = message(GET, Flow::encode_key(original, false, 0, what)?, what);
        match self.0.ask(&request) {
            Ok(replies) => replies
                .first()
                .map(|reply| explain(what, Flow::decode(behind_header(&reply.payload))))
                .transpose(),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Changes the table, and says what became of each change.
    ///
    /// # Errors
    /// The socket failed.
    pub fn apply(&mut self, changes: &[TableChange]) -> Result<Vec<Result<()>>> {
        let messages: Vec<Message> = changes.iter().map(TableChange::message).collect::<Result<_>>()?;
        self.0.change_each(&messages)
    }

    fn dump(&mut self, payload: Vec<u8>, what: &str) -> Result<Vec<Flow>> {
        let replies = self.0.dump(&message(GET, payload, what))?;
        let flows = replies.iter().map(|reply| explain(what, Flow::decode(behind_header(&reply.payload))));
        flows.collect()
    }
}

/// Asks for the connections whose replies are addressed to this address of IPv4.
fn translated_to_ipv4(address: Ipv4Addr, what: &str) -> Result<Vec<u8>> {
    let mut filter = AttributeWriter::new(&header(libc::AF_INET as u8));
    filter.nested(TUPLE_REPLY, |tuple| {
        tuple.nested(TUPLE_ADDRESSES, |inner| inner.bytes(DESTINATION_IPV4, &address.octets()));
    });
    filter.nested(FILTER, |inner| inner.bytes(FILTER_REPLY, &FILTER_DESTINATION.to_ne_bytes()));
    filter.finish(what)
}

impl TableChange {
    fn message(&self) -> Result<Message> {
        let created = (libc::NLM_F_CREATE | libc::NLM_F_EXCL) as u16;
        let (kind, flags, payload, what) = match self {
            Self::Add(flow) => {
                let what = "add a connection";
                if flow.original.inverted().is_none() {
                    let reason = "no reply belongs to its first packet".to_owned();
                    return Err(Error::Invalid { what: what.to_owned(), reason });
                }
                (NEW, created, flow.encode_new(what)?, what)
            }
            Self::Delete(original) => {
                let what = "delete a connection";
                (DELETE, 0, Flow::encode_key(original, false, 0, what)?, what)
            }
            Self::DeleteReply(reply) => {
                let what = "delete the connection of these replies";
                (DELETE, 0, Flow::encode_key(reply, true, 0, what)?, what)
            }
            Self::Update(flow) => {
                let what = "update a connection";
                (NEW, 0, flow.encode_update(what)?, what)
            }
        };
        Ok(Message { flags, ..message(kind, payload, what) })
    }
}
