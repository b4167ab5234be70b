//! Peers of a file (`fairlead node --peers FILE`) as a source of members: they are known without the API server and without a
//! discovery service.
//!
//! The file is read again when its content is another. A file that cannot be read or parsed changes nothing: the last good one counts,
//! and the reason is a problem that users see.

use std::fs::File;
use std::io::{self, Read as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_address::Endpoint;
use fairlead_keys::PublicKey;
use fairlead_topology::{Endpoints, Keepalive, Member, MemberRecord, Source};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use ipnet::IpNet;
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::sleep;

use super::departures::Deletion;
use super::discovery::is_name;
use super::{MemberSource, SourceProblem};

/// Interval at which the file is read.
const INTERVAL: Duration = Duration::from_secs(2);
/// Longer files are refused: several times what 5,000 peers take.
const MAX_LENGTH: u64 = 4 << 20;
/// Most peers of a file.
const MAX_PEERS: usize = 10_000;

/// Peers of the file, or the problem with it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StaticPeers {
    members: Vec<Member>,
    /// Members that were in the file before.
    removed: Vec<Deletion>,
    problem: Option<SourceProblem>,
    unusable_since: Option<Instant>,
}

impl StaticPeers {
    /// Time since which the file cannot be used; `None` while it can.
    pub fn unusable_since(&self) -> Option<Instant> {
        self.unusable_since
    }

    /// Follows another content of the file, or why there is none.
    #[must_use]
    pub fn updated(&self, path: &Path, content: io::Result<&[u8]>, now: Instant) -> Self {
        let parsed = content.map_err(|error| error.to_string()).and_then(parse);
        let members = match parsed {
            Ok(members) => members,
            Err(error) => {
                let problem = SourceProblem::InvalidPeersFile { path: path.display().to_string(), error };
                let unusable_since = self.unusable_since.or(Some(now));
                return Self { problem: Some(problem), unusable_since, ..self.clone() };
            }
        };
        let is_in = |name: &str, key: PublicKey| {
            members.iter().any(|member| member.name == name && member.public_key == Some(key))
        };
        let before = self.members.iter().filter_map(|member| {
            let public_key = member.public_key?;
            Some(Deletion { source: Source::Static, name: member.name.clone(), public_key, next_key: None })
        });
        let removed = self.removed.iter().cloned().chain(before);
        let mut removed: Vec<Deletion> =
            removed.filter(|deletion| !is_in(&deletion.name, deletion.public_key)).collect();
        removed.drain(..removed.len().saturating_sub(MAX_PEERS));
        Self { members, removed, problem: None, unusable_since: None }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    #[serde(default)]
    peers: Vec<Entry>,
}

/// The fields of a WireKubePeer's specification, and its name.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Entry {
    name: String,
    public_key: String,
    #[serde(default)]
    endpoint: Option<String>,
    /// More addresses at which it may be reached.
    #[serde(default)]
    candidates: Vec<SocketAddr>,
    #[serde(default, rename = "allowedIPs")]
    allowed_ips: Vec<IpNet>,
    #[serde(default)]
    persistent_keepalive: Option<u16>,
}

/// Parses a file, all or nothing: half of a file is not what its author wants.
fn parse(content: &[u8]) -> Result<Vec<Member>, String> {
    let text = std::str::from_utf8(content).map_err(|error| error.to_string())?;
    let content: Content = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    if content.peers.len() > MAX_PEERS {
        return Err(format!("it has {} peers, more than {MAX_PEERS}", content.peers.len()));
    }
    let mut members = content.peers.into_iter().map(member).collect::<Result<Vec<_>, _>>()?;
    members.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    let twice = members.windows(2).find_map(|pair| match pair {
        [a, b] if a.name == b.name => Some(a.name.clone()),
        _ => None,
    });
    twice.map_or(Ok(members), |name| Err(format!("peer {name} is in it twice")))
}

fn member(entry: Entry) -> Result<Member, String> {
    let Entry { name, public_key, endpoint, candidates, allowed_ips, persistent_keepalive } = entry;
    if !is_name(&name) {
        return Err(format!("name {name:?} is none of a node (RFC 1123: lower case, digits, - and .)"));
    }
    let invalid = |what: &str, error: String| format!("{what} of peer {name} {error}");
    let key = public_key.parse::<PublicKey>().map_err(|error| invalid("publicKey", format!("is {error}")))?;
    let endpoint = endpoint.map(|text| {
        text.parse::<Endpoint>().map_err(|_| invalid("endpoint", format!("{text:?} is not host:port")))
    });
    let endpoints = Endpoints { manual: endpoint.transpose()?, host: candidates, ..Endpoints::default() };
    let claims = allowed_ips.iter().map(IpNet::trunc).collect();
    let keepalive = Keepalive::every(persistent_keepalive);
    Ok(Member { public_key: Some(key), claims, endpoints, keepalive, ..Member::named(name) })
}

/// Reads the file again and again.
pub struct PeersFile {
    path: PathBuf,
    said: watch::Sender<Arc<StaticPeers>>,
}

impl PeersFile {
    /// Reads the file once, so that its peers are known from the start, and the source that follows it.
    pub fn open(path: PathBuf) -> (Self, StaticSource) {
        let said =
            StaticPeers::default().updated(&path, read(&path).as_deref().map_err(copy), Instant::now());
        if let Some(problem) = &said.problem {
            tracing::warn!(%problem, "cannot use the peers of a file");
        }
        let (said, source) = watch::channel(Arc::new(said));
        (Self { path, said }, StaticSource(source))
    }

    /// Runs until it is dropped.
    pub async fn run(self) {
        let mut last: Option<Vec<u8>> = None;
        loop {
            let path = self.path.clone();
            let content = tokio::task::spawn_blocking(move || read(&path))
                .await
                .unwrap_or_else(|error| Err(io::Error::other(error)));
            let is_known = content.as_ref().is_ok_and(|content| last.as_ref() == Some(content));
            if !is_known {
                let before = Arc::clone(&self.said.borrow());
                let said = before.updated(&self.path, content.as_deref().map_err(copy), Instant::now());
                if said != *before {
                    match &said.problem {
                        Some(problem) => tracing::warn!(%problem, "cannot use the peers of a file"),
                        None => {
                            tracing::info!(path = %self.path.display(), peers = said.members.len(), "read the peers of a file")
                        }
                    }
                    self.said.send_replace(Arc::new(said));
                }
            }
            last = content.ok();
            sleep(INTERVAL).await;
        }
    }
}

fn copy(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), error.to_string())
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path)?.take(MAX_LENGTH + 1).read_to_end(&mut content)?;
    match u64::try_from(content.len()) {
        Ok(length) if length <= MAX_LENGTH => Ok(content),
        _ => Err(io::Error::other(format!("it is longer than {MAX_LENGTH} bytes"))),
    }
}

/// The peers of the file, as a source.
pub struct StaticSource(watch::Receiver<Arc<StaticPeers>>);

impl StaticSource {
    /// Peers of the file and the problem with it, for users.
    pub fn subscribe(&self) -> watch::Receiver<Arc<StaticPeers>> {
        self.0.clone()
    }
}

impl MemberSource for StaticSource {
    fn changed(&mut self) -> BoxFuture<'_, ()> {
        super::sent(&mut self.0).boxed()
    }

    /// The content of the file is known from the start.
    fn is_ready(&self) -> bool {
        true
    }

    fn is_cluster(&self) -> bool {
        false
    }

    fn records(&mut self, problems: &mut Vec<SourceProblem>) -> Vec<MemberRecord> {
        let said = Arc::clone(&self.0.borrow_and_update());
        problems.extend(said.problem.clone());
        let record = |member: &Member| MemberRecord {
            source: Source::Static,
            age: Duration::ZERO,
            member: member.clone(),
        };
        said.members.iter().map(record).collect()
    }

    fn deletions(&mut self) -> Vec<Deletion> {
        self.0.borrow().removed.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";

    fn read(before: &StaticPeers, text: &str) -> StaticPeers {
        before.updated(Path::new("/p"), Ok(text.as_bytes()), Instant::now())
    }

    fn good() -> StaticPeers {
        let text = format!(
            "peers:\n- name: n1\n  publicKey: {KEY}\n  endpoint: n1.example:51820\n  candidates: ['192.0.2.1:51820']\n  allowedIPs: [10.1.2.3/16, 2001:db8::1/128]\n  persistentKeepalive: 7\n"
        );
        read(&StaticPeers::default(), &text)
    }

    #[test]
    fn yaml_and_json_are_read() {
        let said = good();
        assert_eq!(said.problem, None);
        let member = &said.members[0];
        assert_eq!((member.name.as_str(), member.keepalive.interval), ("n1", Some(7)));
        assert_eq!(
            member.claims,
            ["10.1.0.0/16", "2001:db8::1/128"].map(|net| net.parse::<IpNet>().unwrap())
        );
        assert_eq!(member.endpoints.manual, Some("n1.example:51820".parse().unwrap()));
        assert_eq!(member.endpoints.host, ["192.0.2.1:51820".parse().unwrap()]);
        let json = format!(r#"{{"peers":[{{"name":"n2","publicKey":"{KEY}"}}]}}"#);
        let json = read(&said, &json);
        assert_eq!((json.members.len(), json.members[0].name.as_str()), (1, "n2"));
        assert_eq!(json.removed.len(), 1, "n1 was removed on purpose");
        assert_eq!(read(&json, &format!("peers: [{{name: n1, publicKey: '{KEY}'}}]")).removed[0].name, "n2");
    }

    #[test]
    fn of_a_malformed_file_the_reason_is_named_and_the_last_good_one_stays() {
        for (text, why) in [
            ("peers: [".to_owned(), "/p"),
            ("peers: [{name: n1, publicKey: nonsense}]".to_owned(), "publicKey of peer n1 is"),
            (format!("peers: [{{name: N1, publicKey: '{KEY}'}}]"), "\"N1\" is none of a node"),
            (
                format!("peers: [{{name: n1, publicKey: '{KEY}', endpoint: nowhere}}]"),
                "\"nowhere\" is not host:port",
            ),
            (format!("peers: [{{name: n1, publicKey: '{KEY}', color: red}}]"), "color"),
            (format!("peers: [{{name: n1, publicKey: '{KEY}'}}, {{name: n1, publicKey: '{KEY}'}}]"), "twice"),
        ] {
            let said = read(&good(), &text);
            assert_eq!((&said.members, &said.removed), (&good().members, &good().removed), "{text}");
            let problem = said.problem.unwrap().to_string();
            assert!(problem.contains("/p") && problem.contains(why), "{problem}");
        }
        let missing = good().updated(Path::new("/p"), Err(io::ErrorKind::NotFound.into()), Instant::now());
        assert_eq!((missing.members.len(), missing.problem.is_some()), (1, true));
        assert_eq!(read(&missing, "peers: [").unusable_since(), missing.unusable_since(), "it began before");
        let good = read(&missing, "peers: []");
        assert_eq!((good.problem, good.unusable_since), (None, None));
    }

    #[tokio::test]
    async fn the_file_is_read_again_when_it_changes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("peers.yaml");
        std::fs::write(&path, format!("peers: [{{name: n1, publicKey: '{KEY}'}}]")).unwrap();
        let (file, mut source) = PeersFile::open(path.clone());
        let names = |source: &mut StaticSource| {
            let records = source.records(&mut Vec::new());
            records.into_iter().map(|record| record.member.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&mut source), ["n1"], "before anything runs");
        let running = tokio::spawn(file.run());
        std::fs::write(&path, format!("peers: [{{name: n2, publicKey: '{KEY}'}}]")).unwrap();
        source.changed().await;
        assert_eq!(names(&mut source), ["n2"]);
        running.abort();
    }

    proptest::proptest! {
        #[test]
        fn hostile_content_never_panics(content in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = good().updated(Path::new("/p"), Ok(&content), Instant::now());
        }
    }
}
