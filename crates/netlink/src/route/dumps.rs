//! Typed dumps of links, addresses, routes and rules.

use std::os::fd::{AsFd as _, AsRawFd as _};

use netlink_packet_core::{DecodeError, Parseable as _};
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkExtentMask, LinkInfo, LinkMessage};
use netlink_packet_route::nsid::{NsidAttribute, NsidMessage};
use netlink_packet_route::route::{RouteAttribute, RouteMessage};
use netlink_packet_route::rule::RuleMessage;
use nix::libc;

use super::types::{Address, IpFamily, Link, Route, Rule};
use super::{changes, decode};
use crate::netns::Netns;
use crate::{Error, Family, Message, Reply, Result, Socket};

/// A socket of the route family with typed dumps.
#[derive(Debug)]
pub struct RouteSocket {
    socket: Socket,
}

impl RouteSocket {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// Descriptors ran out.
    pub fn open() -> Result<Self> {
        Ok(Self { socket: Socket::open(Family::Route)? })
    }

    /// Opens a socket in another network namespace; it may then be used from any thread.
    ///
    /// # Errors
    /// The namespace cannot be entered.
    pub fn open_in(netns: &Netns) -> Result<Self> {
        netns.run(Self::open)?
    }

    /// All links.
    ///
    /// # Errors
    /// The kernel's refusal or an unreadable answer.
    pub fn links(&mut self) -> Result<Vec<Link>> {
        self.dump_links(Vec::new(), "list links")
    }

    /// All links of one software type: "veth", "wireguard".
    ///
    /// # Errors
    /// The kernel's refusal or an unreadable answer.
    pub fn links_of_kind(&mut self, kind: &str) -> Result<Vec<Link>> {
        let info = LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Other(kind.to_owned()))]);
        let mut links = self.dump_links(vec![info], "list links of one kind")?;
        // Kernels before 4.20 do not filter.
        links.retain(|link| link.kind.as_deref() == Some(kind));
        Ok(links)
    }

    /// All links whose alias has this prefix. The kernel cannot search by alias, so this reads all links.
    ///
    /// # Errors
    /// The kernel's refusal or an unreadable answer.
    pub fn links_by_alias(&mut self, prefix: &str) -> Result<Vec<Link>> {
        let mut links = self.links()?;
        links.retain(|link| link.alias.as_ref().is_some_and(|alias| alias.starts_with(prefix)));
        Ok(links)
    }

    /// The link of a name, if there is one.
    ///
    /// # Errors
    /// The kernel's refusal for another reason than its absence, or an unreadable answer.
    pub fn link_by_name(&mut self, name: &str) -> Result<Option<Link>> {
        let mut request = LinkMessage::default();
        request.attributes = vec![LinkAttribute::IfName(name.to_owned())];
        self.look_up(request, format!("look up link {name}"))
    }

    /// The link of an index, if there is one.
    ///
    /// # Errors
    /// The kernel's refusal for another reason than its absence, or an unreadable answer.
    pub fn link(&mut self, index: u32) -> Result<Option<Link>> {
        let mut request = LinkMessage::default();
        request.header.index = index;
        self.look_up(request, format!("look up link {index}"))
    }

    fn look_up(&mut self, mut request: LinkMessage, what: String) -> Result<Option<Link>> {
        request.attributes.push(skip_statistics());
        let request = changes::message(libc::RTM_GETLINK, 0, &request, what);
        match self.socket.ask(&request) {
            Err(error) if error.errno() == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(error),
            Ok(replies) => Ok(links(&replies, &request.what)?.into_iter().next()),
        }
    }

    /// The ID that this socket's namespace has for another one (`NETNSA_NSID`), as in [`Link::peer_netns`]; `None` if it has none yet.
    ///
    /// # Errors
    /// The kernel's refusal or an unreadable answer.
    pub fn netns_number(&mut self, other: &Netns) -> Result<Option<i32>> {
        let mut request = NsidMessage::default();
        request.attributes = vec![NsidAttribute::Fd(other.as_fd().as_raw_fd().cast_unsigned())];
        let what = format!("look up network namespace {}", other.path().display());
        let request = changes::message(libc::RTM_GETNSID, 0, &request, what);
        let replies = self.socket.ask(&request)?;
        let numbers = decode_all(&replies, libc::RTM_NEWNSID, &request.what, NsidMessage::parse)?;
        let attributes = numbers.into_iter().flat_map(|message| message.attributes);
        // The kernel reports -1 for a namespace without an ID.
        Ok(attributes.into_iter().find_map(|it| match it {
            NsidAttribute::Id(number) => u32::try_from(number).ok().map(u32::cast_signed),
            _ => None,
        }))
    }

    /// All IPv4 and IPv6 addresses.
    ///
    /// # Errors
    /// The kernel's refusal or an unreadable answer.
    pub fn addresses(&mut self) -> Result<Vec<Address>> {
        self.dump_addresses(0)
    }

    /// The IPv4 and IPv6 addresses of one link.
    ///
    /// # Errors
    /// The kernel's refusal or an unreadable answer.
    pub fn addresses_on(&mut self, link: u32) -> Result<Vec<Address>> {
        let mut found = self.dump_addresses(link)?;
        found.retain(|address| address.link == link);
        Ok(found)
    }

    /// The IPv4 and IPv6 routes of one table; a table that was never used is empty.
    ///
    /// # Errors
    /// The kernel's refusal or an unreadable answer.
    pub fn routes(&mut self, table: u32) -> Result<Vec<Route>> {
        let mut found = Vec::new();
        for family in IpFamily::BOTH {
            found.extend(self.routes_of(family, table)?);
        }
        Ok(found)
    }

    /// The IPv4 and IPv6 routes of all tables.
    ///
    /// # Errors
    /// The kernel's refusal or an unreadable answer.
    pub fn all_routes(&mut self) -> Result<Vec<Route>> {
        let mut found = Vec::new();
        for family in IpFamily::BOTH {
            found.extend(self.dump_routes(family, None)?);
        }
        Ok(found)
    }

    /// All IPv4 and IPv6 rules.
    ///
    /// # Errors
    /// The kernel's refusal or an unreadable answer.
    pub fn rules(&mut self) -> Result<Vec<Rule>> {
        let mut found = Vec::new();
        for family in IpFamily::BOTH {
            let mut request = RuleMessage::default();
            request.header.family = changes::family(family);
            let request = changes::message(libc::RTM_GETRULE, 0, &request, format!("list {family} rules"));
            let replies = self.dump_or_nothing(&request, libc::EAFNOSUPPORT)?;
            let rules = decode_all(&replies, libc::RTM_NEWRULE, &request.what, decode::rule)?;
            // A kernel without a family answers with those of all others.
            found.extend(rules.into_iter().flatten().filter(|rule| rule.family == family));
        }
        Ok(found)
    }

    /// Sends messages and stops at the first refusal.
    ///
    /// # Errors
    /// See [`Socket::change`].
    pub fn apply(&mut self, messages: &[Message]) -> Result<()> {
        self.socket.change(messages)
    }

    /// Sends messages and reports the result of each.
    ///
    /// # Errors
    /// See [`Socket::change_each`].
    pub fn apply_each(&mut self, messages: &[Message]) -> Result<Vec<Result<()>>> {
        self.socket.change_each(messages)
    }

    /// Dumps a table; see [`Socket::dump`].
    pub(super) fn dump(&mut self, request: &Message) -> Result<Vec<Reply>> {
        self.socket.dump(request)
    }

    fn dump_links(&mut self, filter: Vec<LinkAttribute>, what: &str) -> Result<Vec<Link>> {
        let mut request = LinkMessage::default();
        request.attributes = filter;
        request.attributes.push(skip_statistics());
        let request = changes::message(libc::RTM_GETLINK, 0, &request, what.to_owned());
        let replies = self.socket.dump(&request)?;
        links(&replies, what)
    }

    fn dump_addresses(&mut self, link: u32) -> Result<Vec<Address>> {
        let mut request = AddressMessage::default();
        request.header.index = link;
        let mut found = Vec::new();
        for family in IpFamily::BOTH {
            request.header.family = changes::family(family);
            let what = format!("list {family} addresses");
            let request = changes::message(libc::RTM_GETADDR, 0, &request, what);
            let replies = self.dump_or_nothing(&request, libc::EAFNOSUPPORT)?;
            let addresses = decode_all(&replies, libc::RTM_NEWADDR, &request.what, decode::address)?;
            let of_family = |it: &Address| IpFamily::of(it.prefix.addr()) == family;
            found.extend(addresses.into_iter().flatten().filter(of_family));
        }
        Ok(found)
    }

    /// The routes of one table and one family; a table that was never used is empty.
    ///
    /// # Errors
    /// The kernel's refusal or an unreadable answer.
    pub fn routes_of(&mut self, family: IpFamily, table: u32) -> Result<Vec<Route>> {
        let mut routes = self.dump_routes(family, Some(table))?;
        // Kernels before 4.20 do not filter.
        routes.retain(|route| route.table == table);
        Ok(routes)
    }

    fn dump_routes(&mut self, family: IpFamily, table: Option<u32>) -> Result<Vec<Route>> {
        let mut request = RouteMessage::default();
        request.header.address_family = changes::family(family);
        request.attributes.extend(table.map(RouteAttribute::Table));
        // With the strict filter a table that was never used is not there.
        let (of, nothing) = match table {
            Some(table) => (format!(" of table {table}"), libc::ENOENT),
            None => (String::new(), libc::EAFNOSUPPORT),
        };
        let what = format!("list {family} routes{of}");
        let request = changes::message(libc::RTM_GETROUTE, 0, &request, what);
        let replies = self.dump_or_nothing(&request, nothing)?;
        let routes = decode_all(&replies, libc::RTM_NEWROUTE, &request.what, decode::route)?;
        // A kernel without a family (`ipv6.disable=1`) answers with the routes of all others.
        Ok(routes.into_iter().flatten().filter(|route| route.family() == family).collect())
    }

    fn dump_or_nothing(&mut self, request: &Message, absence: i32) -> Result<Vec<Reply>> {
        match self.socket.dump(request) {
            Err(error) if error.errno() == Some(absence) => Ok(Vec::new()),
            other => other,
        }
    }
}

/// A link's statistics are most of its message, and are not used here.
fn skip_statistics() -> LinkAttribute {
    LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats])
}

fn links(replies: &[Reply], what: &str) -> Result<Vec<Link>> {
    decode_all(replies, libc::RTM_NEWLINK, what, decode::link)
}

fn decode_all<T>(
    replies: &[Reply],
    kind: u16,
    what: &str,
    decode: impl Fn(&[u8]) -> std::result::Result<T, DecodeError>,
) -> Result<Vec<T>> {
    let malformed =
        |error: DecodeError| Error::Malformed { what: what.to_owned(), reason: error.to_string() };
    let wanted = replies.iter().filter(|reply| reply.kind == kind);
    wanted.map(|reply| decode(&reply.payload).map_err(malformed)).collect()
}
