//! The programs at an uplink and the tunnels of its network namespace.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::os::fd::AsFd as _;

use aya::Pod;
use aya::maps::{HashMap, MapData, MapError, PerCpuValues, lpm_trie};
use fairlead_api::fou::Service;
use fairlead_netlink::route::{
    BpfFilter, FilterHook, FilterPlace, KIND_IFB, Link, RouteSocket, add_clsact, delete_bpf_filter,
    set_bpf_filter,
};
use ipnet::IpNet;

use crate::difference::{Difference, Step, difference, steps};
use crate::kernel::{self, EGRESS, INGRESS, Loaded, NamedMaps, Program, VERSION, map_failed};
use crate::layout::{self, AddressBytes, TrafficNumbers};
use crate::{
    ClientTraffic, Counter, Counters, Error, Flow, Peer, Result, Settings, TunnelLink, flows, links,
};

/// Before the filters of other programs, which would end the processing of a packet.
const PRIORITY: u16 = 1;
/// "FOU": other programs do not choose this number.
const HANDLE: u32 = 0x46_4f_55;

const WITHOUT_CLSACT: &str =
    "the kernel has no queueing discipline clsact (CONFIG_NET_SCH_INGRESS, module sch_ingress)";
const WITHOUT_CLS_BPF: &str = "the kernel has no BPF classifier (CONFIG_NET_CLS_BPF, module cls_bpf)";

/// The programs with maps of their own, attached nowhere: they belong to no network namespace yet. Loading them takes tens of milliseconds,
/// most of which the kernel's verifier takes, so they may be loaded before they are needed. Dropping it frees them.
pub struct Programs(Loaded);

impl Programs {
    /// Loads them. Blocks, and may be called in any network namespace.
    ///
    /// # Errors
    /// The kernel lacks a feature, or the process lacks a capability; the text says which.
    pub fn load() -> Result<Self> {
        kernel::load().map(Self)
    }

    /// The kernel's IDs, at egress and at ingress.
    pub(crate) fn ids(&self) -> [u32; 2] {
        [self.0.egress.id, self.0.ingress.id]
    }
}

impl fmt::Debug for Programs {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Programs").field(&self.ids()).finish()
    }
}

/// FoU tunnels over one uplink. Dropping it changes nothing in the kernel.
pub struct Tunnels {
    socket: RouteSocket,
    uplink: u32,
    loaded: Loaded,
}

impl Tunnels {
    /// Attaches the programs to the uplink of this index, in the network namespace of the calling thread; later calls may come
    /// from any thread. Programs of an earlier process are adopted with what their maps hold. If they are of another version,
    /// new ones get a copy of these maps and replace them, and flows keep their gateways.
    ///
    /// # Errors
    /// The uplink does not exist, the kernel lacks a feature, or the process lacks a capability; the text says which.
    pub fn open(uplink: u32, settings: Settings) -> Result<Self> {
        Self::open_with(uplink, settings, Programs::load)
    }

    /// As [`Self::open`], with programs that `load` returns; it is called only if programs cannot be adopted.
    ///
    /// # Errors
    /// As [`Self::open`], or the error of `load`.
    pub fn open_with(
        uplink: u32,
        settings: Settings,
        load: impl FnOnce() -> Result<Programs>,
    ) -> Result<Self> {
        Self::open_version(uplink, settings, VERSION, load)
    }

    /// Loads programs with maps of their own, and attaches nothing: packets do not see them before [`Self::attach`]. Programs of an
    /// earlier process stay attached meanwhile, and are not looked at. For processes without `CAP_SYS_ADMIN`, which cannot adopt them:
    /// such a process fills the maps as they were, and then replaces the programs.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn load(uplink: u32, settings: Settings) -> Result<Self> {
        let mut socket = RouteSocket::open()?;
        uplink_of(&mut socket, uplink)?;
        let mut tunnels = Self { socket, uplink, loaded: kernel::load()? };
        tunnels.set_settings(&settings.bytes(VERSION, uplink))?;
        Ok(tunnels)
    }

    /// Attaches the programs to the uplink where they are not attached, each in place of one of an earlier process in one step; first
    /// the one that lets packets out. Tunnel links get theirs by [`Self::set_links`]. Returns the number of changes.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn attach(&mut self) -> Result<usize> {
        let Loaded { egress, ingress, .. } = &self.loaded;
        let mut changes = 0usize;
        for (hook, name, program) in
            [(FilterHook::Egress, EGRESS, egress), (FilterHook::Ingress, INGRESS, ingress)]
        {
            if attached(&mut self.socket, self.uplink, hook)? != Some(program.id) {
                attach(&mut self.socket, self.uplink, hook, name, program)?;
                changes = changes.saturating_add(1);
            }
        }
        Ok(changes)
    }

    /// Whether both programs are attached to the uplink.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn is_attached(&mut self) -> Result<bool> {
        let programs =
            [(FilterHook::Egress, self.loaded.egress.id), (FilterHook::Ingress, self.loaded.ingress.id)];
        for (hook, id) in programs {
            if attached(&mut self.socket, self.uplink, hook)? != Some(id) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(crate) fn open_version(
        uplink: u32,
        settings: Settings,
        version: u64,
        load: impl FnOnce() -> Result<Programs>,
    ) -> Result<Self> {
        let mut socket = RouteSocket::open()?;
        uplink_of(&mut socket, uplink)?;
        let egress = attached(&mut socket, uplink, FilterHook::Egress)?;
        let ingress = attached(&mut socket, uplink, FilterHook::Ingress)?;
        let bytes = settings.bytes(version, uplink);
        let earlier = match (egress, ingress) {
            (None, None) => None,
            _ => match kernel::find(egress, ingress)?.of_version(version) {
                Ok(loaded) => {
                    let mut tunnels = Self { socket, uplink, loaded };
                    tunnels.set_settings(&bytes)?;
                    return Ok(tunnels);
                }
                Err(maps) => Some(maps),
            },
        };
        let mut tunnels = Self { socket, uplink, loaded: load()?.0 };
        tunnels.set_settings(&bytes)?;
        tunnels.attach_first(earlier)?;
        Ok(tunnels)
    }

    /// Index of the uplink.
    pub fn uplink(&self) -> u32 {
        self.uplink
    }

    /// Makes the tunnel link to a peer, or to the service address of gateways: an ifb link named by [`link_name`], with the
    /// uplink's link-layer address and the MTU of [`link_mtu`], up. Returns its index. A link that is there is kept, and changed
    /// where it differs.
    ///
    /// [`link_name`]: crate::link_name
    /// [`link_mtu`]: crate::link_mtu
    ///
    /// # Errors
    /// The kernel has no ifb links, a link of another type has the name, or the MTU of the uplink is too small.
    pub fn add_link(&mut self, peer: IpAddr) -> Result<u32> {
        let uplink = uplink_of(&mut self.socket, self.uplink)?;
        links::ready(&mut self.socket, &uplink, peer)
    }

    /// Sets all tunnel links, by index, and returns the number of changes. A link that is no longer among them drops all packets.
    ///
    /// # Errors
    /// A link cannot be expressed or does not exist, or the kernel refuses.
    pub fn set_links(&mut self, wanted: &BTreeMap<u32, TunnelLink>) -> Result<usize> {
        let bytes = |(index, link): (&u32, &TunnelLink)| Ok((index.to_ne_bytes(), link.bytes(*index)?));
        let bytes = wanted.iter().map(bytes).collect::<Result<_>>()?;
        let mut changes = apply("the tunnel links", &mut self.loaded.maps.links, &bytes)?;
        for index in wanted.keys() {
            if attached(&mut self.socket, *index, FilterHook::Egress)? != Some(self.loaded.egress.id) {
                let egress = &self.loaded.egress;
                attach(&mut self.socket, *index, FilterHook::Egress, EGRESS, egress)?;
                changes = changes.saturating_add(1);
            }
        }
        Ok(changes)
    }

    /// Sets all peers, by outer address, and returns the number of changes. Traffic of clients is counted from then on, and forgotten
    /// when they are none any more.
    ///
    /// # Errors
    /// There are more than 4096, or the kernel refuses.
    pub fn set_peers(&mut self, wanted: &BTreeMap<IpAddr, Peer>) -> Result<usize> {
        let bytes = wanted.iter().map(|(address, peer)| (layout::address(*address), peer.bytes())).collect();
        let changes = apply("the peers", &mut self.loaded.maps.peers, &bytes)?;
        if changes > 0 {
            let clients = wanted.iter().filter(|(_, peer)| matches!(peer, Peer::Client { .. }));
            self.count_traffic(&clients.map(|(address, _)| layout::address(*address)).collect())?;
        }
        Ok(changes)
    }

    /// Begins to count what these clients send and receive, and forgets others.
    fn count_traffic(&mut self, clients: &BTreeSet<AddressBytes>) -> Result<()> {
        let map = &mut self.loaded.maps.traffic;
        let failed = |error: MapError| map_failed("count the traffic of clients", &error);
        let counted: BTreeSet<AddressBytes> =
            map.keys().collect::<std::result::Result<_, _>>().map_err(failed)?;
        for gone in counted.difference(clients) {
            map.remove(gone).map_err(failed)?;
        }
        for client in clients.difference(&counted) {
            map.insert(client, kernel::no_traffic()?, 0).map_err(failed)?;
        }
        Ok(())
    }

    /// Packets and bytes exchanged with each client since it became one: a system call for each client.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn traffic(&self) -> Result<BTreeMap<IpAddr, ClientTraffic>> {
        let read = |error: MapError| map_failed("read the traffic of clients", &error);
        let of = |entry: std::result::Result<(AddressBytes, PerCpuValues<TrafficNumbers>), MapError>| {
            let (address, numbers) = entry.map_err(read)?;
            Ok((IpAddr::from(address).to_canonical(), ClientTraffic::sum(numbers.iter())))
        };
        self.loaded.maps.traffic.iter().map(of).collect()
    }

    /// Sets all source addresses with which packets may leave the uplink besides those of [`Settings::own`], and returns the number of
    /// changes.
    ///
    /// # Errors
    /// There are more than 64, or the kernel refuses.
    pub fn set_sources(&mut self, wanted: &BTreeSet<IpAddr>) -> Result<usize> {
        let bytes = wanted.iter().map(|address| (layout::address(*address), 1u32.to_ne_bytes())).collect();
        apply("the further source addresses", &mut self.loaded.maps.sources, &bytes)
    }

    /// Sets all service addresses with their gateways, and returns the number of changes. The gateways of one service are replaced
    /// at once. Flows to a gateway that is no longer there get another one.
    ///
    /// # Errors
    /// A service has too many gateways or one of another family, there are more than 64 services, or the kernel refuses.
    pub fn set_services(&mut self, wanted: &BTreeMap<IpAddr, Service>) -> Result<usize> {
        let bytes = |(address, service): (&IpAddr, &Service)| {
            Ok((layout::address(*address), layout::service_bytes(service, *address)?))
        };
        let bytes = wanted.iter().map(bytes).collect::<Result<_>>()?;
        apply("the gateways of services", &mut self.loaded.maps.services, &bytes)
    }

    /// Sets all inner destinations that clients may (`true`) and may not (`false`) send to, and returns the number of changes. The
    /// longest prefix decides; what has no prefix is not allowed. At no moment is more allowed than before and after together.
    ///
    /// # Errors
    /// There are more than [`MAX_ALLOWED`](crate::MAX_ALLOWED) prefixes, or the kernel refuses.
    pub fn set_allowed(&mut self, wanted: &BTreeMap<IpNet, bool>) -> Result<usize> {
        let map = &mut self.loaded.maps.allowed;
        let read = |error: MapError| map_failed("read the allowed destinations", &error);
        let mut actual = BTreeMap::new();
        for entry in map.iter() {
            let (key, value) = entry.map_err(read)?;
            actual.insert((key.prefix_len(), key.data()), u32::from_ne_bytes(value) != 0);
        }
        let wanted: BTreeMap<_, _> =
            wanted.iter().map(|(prefix, allowed)| (layout::prefix(prefix), *allowed)).collect();
        let steps = steps(&actual, &wanted);
        for step in &steps {
            let key = |(bits, address): (u32, AddressBytes)| lpm_trie::Key::new(bits, address);
            let done = match *step {
                Step::Allow(prefix) => map.insert(&key(prefix), 1u32.to_ne_bytes(), 0),
                Step::Forbid(prefix) => map.insert(&key(prefix), 0u32.to_ne_bytes(), 0),
                Step::Remove(prefix) => map.remove(&key(prefix)),
            };
            done.map_err(|error| map_failed("set the allowed destinations", &error))?;
        }
        Ok(steps.len())
    }

    /// Sets the inner sources of what gateways may send, and returns the number of changes: the longest prefix has the service whose gateways
    /// may send from an address, `None` for no gateway. ICMP errors have any source: they are about a packet to an address that has the service.
    /// While a source has no prefix, which is so before the first call, packets from it are not checked; where it has one, the inner destination has
    /// to be the outer one, too.
    ///
    /// # Errors
    /// There are more than [`MAX_ORIGINS`](crate::MAX_ORIGINS) prefixes, or the kernel refuses.
    pub fn set_origins(&mut self, wanted: &BTreeMap<IpNet, Option<IpAddr>>) -> Result<usize> {
        let map = &mut self.loaded.maps.origins;
        let read = |error: MapError| map_failed("read the sources of gateways", &error);
        let mut actual = BTreeMap::new();
        for entry in map.iter() {
            let (key, service) = entry.map_err(read)?;
            actual.insert((key.prefix_len(), key.data()), service);
        }
        let bytes = |service: &Option<IpAddr>| service.map_or([0; 16], layout::address);
        let wanted: BTreeMap<_, AddressBytes> =
            wanted.iter().map(|(prefix, service)| (layout::prefix(prefix), bytes(service))).collect();
        let found = difference(&actual, &wanted);
        let changes = found.len();
        let failed = |error: MapError| map_failed("set the sources of gateways", &error);
        let key = |(bits, address): (u32, AddressBytes)| lpm_trie::Key::new(bits, address);
        // A longer prefix is there before, and goes after, those around it.
        for (prefix, service) in found.set.into_iter().rev() {
            map.insert(&key(prefix), service, 0).map_err(failed)?;
        }
        for prefix in found.remove {
            map.remove(&key(prefix)).map_err(failed)?;
        }
        Ok(changes)
    }

    /// Counters of the programs, summed over all processors.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn counters(&self) -> Result<Counters> {
        let mut counters = [0; Counter::ALL.len()];
        for (counter, values) in counters.iter_mut().zip(self.loaded.maps.counters.iter()) {
            let values = values.map_err(|error| map_failed("read the counters", &error))?;
            *counter = values.iter().fold(0, |sum: u64, value| sum.wrapping_add(*value));
        }
        Ok(Counters(counters))
    }

    /// The flows for which a gateway was chosen, at most the 4096 of the map. Some may be missing if it changes meanwhile.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn flows(&self) -> Result<Vec<Flow>> {
        let entries = self.loaded.maps.flows.iter().take(MAX_FLOWS);
        let read = entries.filter_map(|entry| {
            let entry = entry.map_err(|error| map_failed("read the flows", &error));
            entry.map(|(flow, choice)| flows::read(&flow, &choice)).transpose()
        });
        read.collect()
    }

    /// Detaches the programs from the uplink and from the tunnel links, first those that let packets in. Tunnel links stay, and
    /// drop all packets.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove(mut self) -> Result<()> {
        detach(&mut self.socket, self.uplink, FilterHook::Ingress)?;
        for link in self.socket.links_of_kind(KIND_IFB)? {
            if attached(&mut self.socket, link.index, FilterHook::Egress)?.is_some() {
                detach(&mut self.socket, link.index, FilterHook::Egress)?;
            }
        }
        detach(&mut self.socket, self.uplink, FilterHook::Egress)
    }

    #[cfg(test)]
    pub(crate) fn insert_flow(&mut self, flow: layout::FlowBytes, choice: layout::ChoiceBytes) {
        self.loaded.maps.flows.insert(flow, choice, 0).unwrap();
    }

    /// Writes the settings if they differ.
    fn set_settings(&mut self, wanted: &layout::SettingsBytes) -> Result<()> {
        let map = &mut self.loaded.maps.settings;
        let failed = |error: MapError| map_failed("set the settings of the FoU programs", &error);
        if map.get(&0, 0).map_err(failed)? == *wanted {
            Ok(())
        } else {
            map.set(0, wanted, 0).map_err(failed)
        }
    }

    /// Attaches programs that were just loaded. They replace those whose maps are given, on the tunnel links, too.
    fn attach_first(&mut self, earlier: Option<NamedMaps>) -> Result<()> {
        let flows = earlier.map(|maps| self.loaded.maps.copy(maps)).transpose()?.flatten();
        let Loaded { egress, ingress, .. } = &self.loaded;
        attach(&mut self.socket, self.uplink, FilterHook::Egress, EGRESS, egress)?;
        for link in self.socket.links_of_kind(KIND_IFB)? {
            if attached(&mut self.socket, link.index, FilterHook::Egress)?.is_some() {
                attach(&mut self.socket, link.index, FilterHook::Egress, EGRESS, egress)?;
            }
        }
        attach(&mut self.socket, self.uplink, FilterHook::Ingress, INGRESS, ingress)?;
        // Flows of packets that passed the replaced program while the maps were copied.
        flows.map_or(Ok(()), |flows| self.loaded.maps.copy_flows(&flows))
    }
}

const MAX_FLOWS: usize = 4096;

impl fmt::Debug for Tunnels {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let programs = [self.loaded.egress.id, self.loaded.ingress.id];
        out.debug_struct("Tunnels")
            .field("uplink", &self.uplink)
            .field("programs", &programs)
            .finish_non_exhaustive()
    }
}

fn uplink_of(socket: &mut RouteSocket, index: u32) -> Result<Link> {
    let missing =
        || Error::invalid(format!("use link {index} as the uplink of FoU"), "there is no such link");
    socket.link(index)?.ok_or_else(missing)
}

fn place(link: u32, hook: FilterHook) -> FilterPlace {
    FilterPlace { link, hook, priority: PRIORITY, handle: HANDLE }
}

/// Whether a filter is one that [`Tunnels`] attaches, by its place.
pub fn is_own_filter(filter: &BpfFilter) -> bool {
    filter.priority == PRIORITY && filter.handle == HANDLE
}

/// ID of our program at a hook.
fn attached(socket: &mut RouteSocket, link: u32, hook: FilterHook) -> Result<Option<u32>> {
    let filters = socket.bpf_filters(link, hook)?;
    Ok(filters.iter().find(|filter| is_own_filter(filter)).map(|filter| filter.program))
}

/// Attaches a program, or replaces ours without a moment at which none is attached.
fn attach(
    socket: &mut RouteSocket,
    link: u32,
    hook: FilterHook,
    name: &str,
    program: &Program,
) -> Result<()> {
    let filter = set_bpf_filter(&place(link, hook), name, program.fd.as_fd())?;
    // Without the former the kernel refuses the latter.
    let mut outcomes = socket.apply_each(&[add_clsact(link)?, filter])?.into_iter();
    match outcomes.next() {
        Some(Err(error)) if !error.is_existing() => return Err(Error::netlink(error, WITHOUT_CLSACT)),
        _ => {}
    }
    let filtered = outcomes.next().unwrap_or(Ok(()));
    filtered.map_err(|error| Error::netlink(error, WITHOUT_CLS_BPF))
}

fn detach(socket: &mut RouteSocket, link: u32, hook: FilterHook) -> Result<()> {
    match socket.apply(&[delete_bpf_filter(&place(link, hook))?]) {
        Err(error) if !error.is_missing() => Err(error.into()),
        _ => Ok(()),
    }
}

/// Brings a map to the desired entries: first what is missing or different, then what is too much.
fn apply<K: Pod + Ord, V: Pod + PartialEq>(
    what: &str,
    map: &mut HashMap<MapData, K, V>,
    wanted: &BTreeMap<K, V>,
) -> Result<usize> {
    let actual = map.iter().collect::<std::result::Result<BTreeMap<K, V>, MapError>>();
    let actual = actual.map_err(|error| map_failed(&format!("read {what}"), &error))?;
    let found = difference(&actual, wanted);
    let changes = found.len();
    let Difference { set, remove } = found;
    let failed = |error: MapError| map_failed(&format!("set {what}"), &error);
    set.into_iter().try_for_each(|(key, value)| map.insert(key, value, 0)).map_err(failed)?;
    remove.into_iter().try_for_each(|key| map.remove(&key)).map_err(failed)?;
    Ok(changes)
}
