//! Programs and maps in the kernel: loading them, and finding those of an earlier process by their IDs.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::sync::{LazyLock, Mutex, PoisonError};

use aya::maps::{
    Array, HashMap, LpmTrie, Map, MapData, MapError, MapInfo, PerCpuArray, PerCpuHashMap, PerCpuValues,
};

use aya::programs::{ProgramFd, ProgramInfo, SchedClassifier, loaded_programs};
use aya::util::nr_cpus;
use aya::{Ebpf, EbpfLoader, Pod};

use crate::layout::{
    AddressBytes, ChoiceBytes, FlowBytes, LinkBytes, PeerBytes, ServiceBytes, SettingsBytes, TrafficNumbers,
    version,
};
use crate::{Error, Result};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/fou.bpf.o"));

/// The version of the programs: a hash of their source.
pub(crate) const VERSION: u64 = match u64::from_str_radix(env!("FOU_VERSION"), 16) {
    Ok(version) => version,
    Err(_) => 0,
};
/// Names of the programs.
pub(crate) const EGRESS: &str = "fou_egress";
pub(crate) const INGRESS: &str = "fou_ingress";

const TO_LOAD: &str = "it needs the capabilities CAP_BPF and CAP_NET_ADMIN, and a seccomp profile that permits bpf (not that of CRI-O)";
const TO_FIND: &str =
    "it needs the capability CAP_SYS_ADMIN, without which the kernel opens no program by its ID";
const TO_USE: &str = "it needs the capability CAP_BPF";

/// A failure while a map is read or written.
pub(crate) fn map_failed(what: &str, error: &MapError) -> Error {
    Error::bpf(what.to_owned(), error, TO_USE)
}

/// A program, held open.
#[derive(Debug)]
pub(crate) struct Program {
    /// The kernel's ID.
    pub(crate) id: u32,
    /// Descriptor that keeps the program open.
    pub(crate) fd: ProgramFd,
}

/// The maps, held open. `struct` names of the values are in `layout`.
pub(crate) struct Maps {
    pub(crate) settings: Array<MapData, SettingsBytes>,
    pub(crate) links: HashMap<MapData, [u8; 4], LinkBytes>,
    pub(crate) peers: HashMap<MapData, AddressBytes, PeerBytes>,
    pub(crate) services: HashMap<MapData, AddressBytes, ServiceBytes>,
    pub(crate) flows: HashMap<MapData, FlowBytes, ChoiceBytes>,
    pub(crate) allowed: LpmTrie<MapData, AddressBytes, [u8; 4]>,
    pub(crate) origins: LpmTrie<MapData, AddressBytes, AddressBytes>,
    pub(crate) traffic: PerCpuHashMap<MapData, AddressBytes, TrafficNumbers>,
    pub(crate) sources: HashMap<MapData, AddressBytes, [u8; 4]>,
    pub(crate) counters: PerCpuArray<MapData, u64>,
}

/// Both programs and their maps.
pub(crate) struct Loaded {
    pub(crate) egress: Program,
    pub(crate) ingress: Program,
    pub(crate) maps: Maps,
}

/// Without the kernel's BTF, which the programs do not need: each new loader of aya reads all of it, 5 MB on some kernels, and that takes
/// half as long as the verifier does. Locked while maps are created, not while programs are verified.
static LOADER: LazyLock<Mutex<EbpfLoader<'static>>> = LazyLock::new(|| {
    let mut loader = EbpfLoader::new();
    loader.btf(None);
    Mutex::new(loader)
});

/// Loads the programs and creates their maps. They vanish with the returned value unless the programs are attached.
pub(crate) fn load() -> Result<Loaded> {
    let failed =
        |error: &(dyn StdError + 'static)| Error::bpf("load the FoU programs".to_owned(), error, TO_LOAD);
    let created = LOADER.lock().unwrap_or_else(PoisonError::into_inner).load(OBJECT);
    let mut bpf = created.map_err(|error| failed(&error))?;
    let egress = load_program(&mut bpf, EGRESS)?;
    let ingress = load_program(&mut bpf, INGRESS)?;
    let names: Vec<String> = bpf.maps().map(|(name, _)| name.to_owned()).collect();
    let mut named: NamedMaps =
        names.into_iter().filter_map(|name| Some((name.clone(), bpf.take_map(&name)?))).collect();
    Ok(Loaded { egress, ingress, maps: Maps::take(&mut named)? })
}

fn load_program(bpf: &mut Ebpf, name: &str) -> Result<Program> {
    let what = || format!("load the BPF program {name}");
    let program = bpf.program_mut(name).ok_or_else(|| Error::invalid(what(), "the object file lacks it"))?;
    let program: &mut SchedClassifier =
        program.try_into().map_err(|error| Error::bpf(what(), &error, TO_LOAD))?;
    let mut load = || {
        program.load()?;
        let fd = program.fd()?.try_clone()?;
        Ok(Program { id: program.info()?.id(), fd })
    };
    load().map_err(|error: aya::programs::ProgramError| Error::bpf(what(), &error, TO_LOAD))
}

/// Maps by name.
pub(crate) type NamedMaps = BTreeMap<String, Map>;

/// Programs that an earlier process attached, and the maps that they use.
#[derive(Debug)]
pub(crate) struct Found {
    egress: Option<Program>,
    ingress: Option<Program>,
    maps: NamedMaps,
    /// All programs have the same maps.
    is_consistent: bool,
}

/// Finds programs by their IDs, and the maps that they use.
pub(crate) fn find(egress: Option<u32>, ingress: Option<u32>) -> Result<Found> {
    let mut found = Found { egress: None, ingress: None, maps: BTreeMap::new(), is_consistent: true };
    let mut map_ids = BTreeMap::new();
    for info in infos(&[egress, ingress])? {
        found.take_maps(&info, &mut map_ids)?;
        let what = || format!("open the BPF program {}", info.id());
        let fd = info.fd().map_err(|error| Error::bpf(what(), &error, TO_FIND))?;
        let program = Program { id: info.id(), fd };
        let place = if Some(program.id) == egress { &mut found.egress } else { &mut found.ingress };
        *place = Some(program);
    }
    Ok(found)
}

/// The programs of these IDs.
fn infos(ids: &[Option<u32>]) -> Result<Vec<ProgramInfo>> {
    let mut found = Vec::new();
    let mut failure = None;
    // Other programs may end while they are listed; only the ones looked for matter.
    for info in loaded_programs() {
        match info {
            Ok(info) if ids.contains(&Some(info.id())) => found.push(info),
            Ok(_) => {}
            Err(error) => drop(failure.get_or_insert(error)),
        }
    }
    match failure {
        Some(error) if found.len() < ids.iter().flatten().count() => {
            Err(Error::bpf("find the BPF programs of an earlier process".to_owned(), &error, TO_FIND))
        }
        _ => Ok(found),
    }
}

impl Found {
    /// Opens the maps of a program that are not open yet.
    fn take_maps(&mut self, info: &ProgramInfo, known: &mut BTreeMap<String, u32>) -> Result<()> {
        let what = || format!("open the maps of the BPF program {}", info.id());
        let ids = info.map_ids().map_err(|error| Error::bpf(what(), &error, TO_FIND))?;
        for id in ids.unwrap_or_default() {
            let mut open = || {
                let name = MapInfo::from_id(id)?.name_as_str().unwrap_or_default().to_owned();
                match known.insert(name.clone(), id) {
                    Some(other) => self.is_consistent &= other == id,
                    None => drop(self.maps.insert(name, Map::from_map_data(MapData::from_id(id)?)?)),
                }
                Ok(())
            };
            open().map_err(|error: MapError| Error::bpf(what(), &error, TO_FIND))?;
        }
        Ok(())
    }

    /// Both programs and their maps, if they are of this version; otherwise what is there.
    pub(crate) fn of_version(mut self, wanted: u64) -> std::result::Result<Loaded, NamedMaps> {
        let Some((egress, ingress)) = self.egress.take().zip(self.ingress.take()) else {
            return Err(self.maps);
        };
        if !self.is_consistent || read_version(&mut self.maps) != Some(wanted) {
            return Err(self.maps);
        }
        match Maps::take(&mut self.maps) {
            Ok(maps) => Ok(Loaded { egress, ingress, maps }),
            Err(_) => Err(self.maps),
        }
    }
}

/// The version in the settings; `None` if they are not as large as ours.
fn read_version(maps: &mut NamedMaps) -> Option<u64> {
    let settings = Array::<_, SettingsBytes>::try_from(maps.get("fou_settings")?).ok()?;
    Some(version(&settings.get(&0, 0).ok()?))
}

/// Takes a map of this name whose key and value have the sizes of ours.
fn take<M: TryFrom<Map, Error = MapError>>(maps: &mut NamedMaps, name: &str) -> Result<M> {
    let what = || format!("open the map {name} of the FoU programs");
    let map = maps.remove(name).ok_or_else(|| Error::invalid(what(), "the programs do not have it"))?;
    M::try_from(map).map_err(|error| map_failed(&what(), &error))
}

impl Maps {
    fn take(named: &mut NamedMaps) -> Result<Self> {
        Ok(Self {
            settings: take(named, "fou_settings")?,
            links: take(named, "fou_links")?,
            peers: take(named, "fou_peers")?,
            services: take(named, "fou_services")?,
            flows: take(named, "fou_flows")?,
            allowed: take(named, "fou_allowed")?,
            origins: take(named, "fou_origins")?,
            traffic: take(named, "fou_traffic")?,
            sources: take(named, "fou_sources")?,
            counters: take(named, "fou_counters")?,
        })
    }

    /// Copies what programs of another version hold, as far as the layout is the same. Returns their flows, to be copied once
    /// more with [`Self::copy_flows`] when no packet passes those programs any longer.
    pub(crate) fn copy(&mut self, mut old: NamedMaps) -> Result<Option<OldFlows>> {
        copy_hash(&mut old, "fou_links", &mut self.links)?;
        copy_hash(&mut old, "fou_peers", &mut self.peers)?;
        copy_hash(&mut old, "fou_services", &mut self.services)?;
        copy_trie(&mut old, "fou_allowed", &mut self.allowed)?;
        // The first programs had none.
        if old.contains_key("fou_origins") {
            copy_trie(&mut old, "fou_origins", &mut self.origins)?;
        }
        if let Some(counters) =
            same_layout("fou_counters", take::<PerCpuArray<_, u64>>(&mut old, "fou_counters"))
        {
            for (index, values) in (0..self.counters.len()).zip(counters.iter()) {
                let copied = values.and_then(|values| self.counters.set(index, values, 0));
                copied.map_err(|error| map_failed("copy the map fou_counters", &error))?;
            }
        }
        let flows = same_layout("fou_flows", take(&mut old, "fou_flows"));
        flows.as_ref().map(|flows| self.copy_flows(flows)).transpose()?;
        Ok(flows)
    }

    /// Copies the flows that are not there yet.
    pub(crate) fn copy_flows(&mut self, old: &OldFlows) -> Result<()> {
        for entry in old.iter().take(MAX_FLOWS) {
            let copied = entry.and_then(|(flow, choice)| self.flows.insert(flow, choice, NO_EXIST));
            match copied {
                Err(MapError::SyscallError(error))
                    if error.io_error.kind() == std::io::ErrorKind::AlreadyExists => {}
                other => other.map_err(|error| map_failed("copy the map fou_flows", &error))?,
            }
        }
        Ok(())
    }
}

/// Zero on each CPU.
pub(crate) fn no_traffic() -> Result<PerCpuValues<TrafficNumbers>> {
    let zero = nr_cpus().map_err(|(_, error)| error);
    let zero = zero.and_then(|cpus| PerCpuValues::try_from(vec![TrafficNumbers::default(); cpus]));
    zero.map_err(|error| {
        Error::bpf("count the CPUs".to_owned(), &error, "it reads /sys/devices/system/cpu/possible")
    })
}

/// Flows of programs of another version.
pub(crate) type OldFlows = HashMap<MapData, FlowBytes, ChoiceBytes>;

/// `BPF_NOEXIST` (`linux/bpf.h`).
const NO_EXIST: u64 = 1;
/// A bound for reading a map that packets change meanwhile: its iteration begins again where an entry vanishes.
const MAX_FLOWS: usize = 4 * 4096;

fn copy_hash<K: Pod, V: Pod>(
    old: &mut NamedMaps,
    name: &str,
    new: &mut HashMap<MapData, K, V>,
) -> Result<()> {
    let Some(old) = same_layout(name, take::<HashMap<_, K, V>>(old, name)) else { return Ok(()) };
    let copied = old.iter().try_for_each(|entry| {
        let (key, value) = entry?;
        new.insert(key, value, 0)
    });
    copied.map_err(|error| map_failed(&format!("copy the map {name}"), &error))
}

fn copy_trie<V: Pod>(
    old: &mut NamedMaps,
    name: &str,
    new: &mut LpmTrie<MapData, AddressBytes, V>,
) -> Result<()> {
    let old = take::<LpmTrie<MapData, AddressBytes, V>>(old, name);
    let Some(old) = same_layout(name, old) else { return Ok(()) };
    let copied = old.iter().try_for_each(|entry| {
        let (key, value) = entry?;
        new.insert(&key, value, 0)
    });
    copied.map_err(|error| map_failed(&format!("copy the map {name}"), &error))
}

fn same_layout<M>(name: &str, map: Result<M>) -> Option<M> {
    map.inspect_err(
        |error| tracing::warn!(map = name, %error, "a map of FoU programs of another version is lost"),
    )
    .ok()
}
