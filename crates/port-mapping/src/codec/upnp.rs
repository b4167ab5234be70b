//! UPnP Internet Gateway Device, the control point's half: the search for a gateway (SSDP), its description, and the actions
//! of WANIPConnection:1 and :2 and WANPPPConnection:1 that map a UDP port.
//!
//! XML is read only as far as it is needed: the text of named elements. Requests contain addresses, numbers and constants alone;
//! a gateway's words never go into them, but for the path that it names.

use std::fmt::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use fairlead_wire::http::ResponseHead;

/// UDP port of searches (UPnP Device Architecture 1.1, section 1.3.2).
pub const SEARCH_PORT: u16 = 1900;
/// Multicast group of searches (in the same section).
pub const SEARCH_GROUP: Ipv4Addr = Ipv4Addr::new(239, 255, 255, 250);
/// Targets of a search: both versions of the device. A gateway of version 2 answers to both.
pub const SEARCH_TARGETS: [&str; 2] = [
    "urn:schemas-upnp-org:device:InternetGatewayDevice:1",
    "urn:schemas-upnp-org:device:InternetGatewayDevice:2",
];
/// Longest path that is followed.
const MAX_PATH: usize = 512;
/// Most services that are read of a description.
const MAX_SERVICES: usize = 64;

/// An `http` URL with an address as its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The server.
    pub address: SocketAddr,
    /// Path and query.
    pub path: String,
}

/// A service that maps ports, the best last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServiceType {
    /// WANPPPConnection:1.
    WanPpp1,
    /// WANIPConnection:1.
    WanIp1,
    /// WANIPConnection:2, which chooses a free port if asked to.
    WanIp2,
}

/// A service of a gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Type and version.
    pub service_type: ServiceType,
    /// URL of its actions.
    pub control: Location,
}

/// Action of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action<'a> {
    /// Adds a mapping, at another external port if this one is taken (WANIPConnection:2, section 2.5.18).
    AddAnyPortMapping(PortMapping<'a>),
    /// Adds a mapping at this external port.
    AddPortMapping(PortMapping<'a>),
    /// Deletes the mapping of an external UDP port.
    DeletePortMapping(u16),
    /// Reads the external address.
    GetExternalIpAddress,
    /// Reads to which client an external UDP port leads.
    GetSpecificPortMappingEntry(u16),
}

/// Arguments of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortMapping<'a> {
    /// External UDP port.
    pub external_port: u16,
    /// Address and port to which the gateway sends packets on.
    pub client: SocketAddr,
    /// Shown by the gateway to its owner. Letters, digits and blanks; everything else is left out.
    pub description: &'a str,
    /// Lifetime in seconds; zero does not expire.
    pub lease: u32,
}

/// Answer of a service to an action.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Answer {
    /// `NewExternalIPAddress`.
    pub external_address: Option<IpAddr>,
    /// `NewReservedPort`.
    pub reserved_port: Option<u16>,
    /// `NewInternalClient`.
    pub internal_client: Option<IpAddr>,
    /// `NewInternalPort`.
    pub internal_port: Option<u16>,
    /// Error code with which the service refuses.
    pub error: Option<u16>,
}

/// A search for one of [`SEARCH_TARGETS`].
pub fn search_request(target: &str, to: SocketAddr) -> String {
    format!("M-SEARCH * HTTP/1.1\r\nHOST: {to}\r\nMAN: \"ssdp:discover\"\r\nMX: 1\r\nST: {target}\r\n\r\n")
}

/// The location in the answer to a search; `None` where there is none of use.
pub fn parse_search_response(datagram: &[u8]) -> Option<Location> {
    let head = ResponseHead::parse_lenient(datagram).ok()??;
    let is_gateway = head.headers.value("ST")?.contains("InternetGatewayDevice");
    (head.status == 200 && is_gateway).then(|| head.headers.value("LOCATION")?.parse().ok()).flatten()
}

/// The best service of the gateway's description, which was read from `location`. Services at another address than that are
/// left out: a gateway speaks for itself.
pub fn best_service(description: &[u8], location: &Location) -> Option<Service> {
    let text = String::from_utf8_lossy(description);
    let mut services = Vec::new();
    let mut kind = None;
    let mut control = None;
    for element in Elements::of(&text) {
        match element {
            Element::Start("service") => (kind, control) = (None, None),
            Element::Text("serviceType", text) => kind = ServiceType::parse(text),
            Element::Text("controlURL", text) => control = location.join(text),
            Element::End("service") => {
                if let (Some(service_type), Some(control)) = (kind.take(), control.take()) {
                    services.push(Service { service_type, control });
                }
                if services.len() == MAX_SERVICES {
                    break;
                }
            }
            Element::End(_) | Element::Start(_) | Element::Text(..) => {}
        }
    }
    // The first of equal ones.
    services.into_iter().rev().max_by_key(|service| service.service_type)
}

/// Path, headers and body of the HTTP request for an action.
pub fn action_request(service: &Service, action: &Action<'_>) -> String {
    let name = action.name();
    let urn = service.service_type.urn();
    let body = format!(
        "<?xml version=\"1.0\"?>\r\n<s:Envelope xmlns:s=\"http://schemas.xmlsoap.org/soap/envelope/\" \
         s:encodingStyle=\"http://schemas.xmlsoap.org/soap/encoding/\"><s:Body><u:{name} xmlns:u=\"{urn}\">{}\
         </u:{name}></s:Body></s:Envelope>\r\n",
        action.arguments()
    );
    let Location { address, path } = &service.control;
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: {address}\r\nUser-Agent: fairlead\r\nConnection: close\r\n\
         Content-Type: text/xml; charset=\"utf-8\"\r\nContent-Length: {length}\r\n\
         SOAPAction: \"{urn}#{name}\"\r\n\r\n{body}"
    )
}

/// The HTTP request for a description.
pub fn description_request(location: &Location) -> String {
    let Location { address, path } = location;
    format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nUser-Agent: fairlead\r\nConnection: close\r\n\r\n")
}

/// Reads the body of an answer to an action; what is missing or malformed is left out.
pub fn parse_answer(body: &[u8]) -> Answer {
    let text = String::from_utf8_lossy(body);
    let mut answer = Answer::default();
    for element in Elements::of(&text) {
        let Element::Text(name, text) = element else { continue };
        match name {
            "NewExternalIPAddress" => answer.external_address = text.parse().ok(),
            "NewInternalClient" => answer.internal_client = text.parse().ok(),
            "NewInternalPort" => answer.internal_port = text.parse().ok(),
            "NewReservedPort" => answer.reserved_port = text.parse().ok(),
            "errorCode" => answer.error = Some(text.parse().unwrap_or(u16::MAX)),
            _ => {}
        }
    }
    answer
}

/// The words of an error code (WANIPConnection:2, section 2.5; UPnP Device Architecture 1.1, table 3-3).
pub fn refusal(code: u16) -> &'static str {
    match code {
        401 | 602 => "the gateway does not support it",
        402 => "the gateway does not understand the request",
        501 => "the gateway cannot do it at the moment",
        606 => "it is not allowed on this gateway",
        716 | 718 | 724 | 727 | 729 => "the gateway does not give this port",
        725 => "the gateway supports only mappings without an end",
        728 => "the gateway has no room for more mappings",
        _ => "the gateway gives a reason that is not known",
    }
}

impl std::str::FromStr for Location {
    type Err = ();

    fn from_str(url: &str) -> Result<Self, ()> {
        let has_scheme = url.get(..7).is_some_and(|scheme| scheme.eq_ignore_ascii_case("http://"));
        let rest = url.get(7..).filter(|_| has_scheme).ok_or(())?;
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (host, path) = rest.split_at_checked(end).ok_or(())?;
        let without_port = || host.trim_matches(['[', ']']).parse().map(|ip: IpAddr| SocketAddr::new(ip, 80));
        let address = host.parse().or_else(|_| without_port()).map_err(|_| ())?;
        Self::new(address, path).ok_or(())
    }
}

impl Location {
    /// `None` if the path cannot stand in a request line.
    fn new(address: SocketAddr, path: &str) -> Option<Self> {
        let is_good = path.len() <= MAX_PATH && path.bytes().all(|byte| byte.is_ascii_graphic());
        let separator = if path.starts_with('/') { "" } else { "/" };
        is_good.then(|| Self { address, path: format!("{separator}{path}") })
    }

    /// A reference of a document at this location; `None` if it leads to another host.
    fn join(&self, reference: &str) -> Option<Self> {
        if reference.contains("://") {
            let found: Self = reference.parse().ok()?;
            return (found.address.ip() == self.address.ip()).then_some(found);
        }
        if reference.starts_with('/') {
            return Self::new(self.address, reference);
        }
        let directory = self.path.rsplit_once('/').map_or("", |(directory, _)| directory);
        Self::new(self.address, &format!("{directory}/{reference}"))
    }
}

impl ServiceType {
    const ALL: [Self; 3] = [Self::WanPpp1, Self::WanIp1, Self::WanIp2];

    fn parse(urn: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.urn() == urn)
    }

    fn urn(self) -> &'static str {
        match self {
            Self::WanIp1 => "urn:schemas-upnp-org:service:WANIPConnection:1",
            Self::WanIp2 => "urn:schemas-upnp-org:service:WANIPConnection:2",
            Self::WanPpp1 => "urn:schemas-upnp-org:service:WANPPPConnection:1",
        }
    }
}

impl Action<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::AddAnyPortMapping(_) => "AddAnyPortMapping",
            Self::AddPortMapping(_) => "AddPortMapping",
            Self::DeletePortMapping(_) => "DeletePortMapping",
            Self::GetExternalIpAddress => "GetExternalIPAddress",
            Self::GetSpecificPortMappingEntry(_) => "GetSpecificPortMappingEntry",
        }
    }

    fn arguments(&self) -> String {
        match self {
            Self::AddAnyPortMapping(mapping) | Self::AddPortMapping(mapping) => mapping.to_string(),
            Self::DeletePortMapping(port) | Self::GetSpecificPortMappingEntry(port) => key(*port),
            Self::GetExternalIpAddress => String::new(),
        }
    }
}

/// The arguments that name a mapping.
fn key(external_port: u16) -> String {
    format!(
        "<NewRemoteHost></NewRemoteHost><NewExternalPort>{external_port}</NewExternalPort>\
         <NewProtocol>UDP</NewProtocol>"
    )
}

impl fmt::Display for PortMapping<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&key(self.external_port))?;
        write!(
            f,
            "<NewInternalPort>{}</NewInternalPort><NewInternalClient>{}</NewInternalClient>\
             <NewEnabled>1</NewEnabled><NewPortMappingDescription>",
            self.client.port(),
            self.client.ip()
        )?;
        let is_plain = |character: &char| character.is_ascii_alphanumeric() || *character == ' ';
        self.description.chars().filter(is_plain).try_for_each(|character| f.write_char(character))?;
        write!(f, "</NewPortMappingDescription><NewLeaseDuration>{}</NewLeaseDuration>", self.lease)
    }
}

/// Part of XML that [`Elements`] finds; elements have their local names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Element<'a> {
    Start(&'a str),
    /// The text between the start of an element and the next tag, if that ends the element.
    Text(&'a str, &'a str),
    End(&'a str),
}

/// The tags of a document and the text of its innermost elements. Declarations, comments, entities and attributes are not
/// read: no gateway needs them for addresses, numbers and service types.
struct Elements<'a> {
    rest: &'a str,
    /// The element that started last, and the text behind it.
    open: Option<(&'a str, &'a str)>,
    next: Option<Element<'a>>,
}

impl<'a> Elements<'a> {
    fn of(text: &'a str) -> Self {
        let rest = text.split_once('<').map_or("", |(_, rest)| rest);
        Self { rest, open: None, next: None }
    }
}

impl<'a> Iterator for Elements<'a> {
    type Item = Element<'a>;

    fn next(&mut self) -> Option<Element<'a>> {
        if let Some(next) = self.next.take() {
            return Some(next);
        }
        loop {
            let (tag, behind) = self.rest.split_once('>')?;
            let (text, rest) = behind.split_once('<').unwrap_or((behind, ""));
            self.rest = rest;
            let name = |tag: &'a str| {
                let tag = tag.split(|c: char| c.is_ascii_whitespace() || c == '/').next().unwrap_or("");
                tag.rsplit_once(':').map_or(tag, |(_, local)| local)
            };
            if tag.starts_with(['?', '!']) {
                self.open = None;
            } else if let Some(tag) = tag.strip_prefix('/') {
                let name = name(tag);
                let text = self.open.take().filter(|(open, _)| *open == name).map(|(_, text)| text.trim());
                let Some(text) = text else { return Some(Element::End(name)) };
                self.next = Some(Element::End(name));
                return Some(Element::Text(name, text));
            } else {
                let name = name(tag);
                self.open = (!tag.ends_with('/')).then_some((name, text));
                return Some(Element::Start(name));
            }
        }
    }
}

#[cfg(test)]
mod tests;
