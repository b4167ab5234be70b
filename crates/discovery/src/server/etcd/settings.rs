//! Settings of the etcd that replicas share.

use std::path::PathBuf;

use fairlead_transport::CertificateFiles;

use super::connect::EtcdEndpoint;

/// Settings by which replicas reach the etcd that they share.
#[derive(Debug, Clone)]
pub struct EtcdSettings {
    /// Members of etcd, which are tried in turn.
    pub endpoints: Vec<EtcdEndpoint>,
    /// PEM certificates of the authorities for its certificates; without it those that this host trusts.
    pub authorities: Option<PathBuf>,
    /// Certificate that this replica presents to it.
    pub certificate: Option<CertificateFiles>,
    /// Prefix of all keys. Replicas with the same prefix serve the same clients.
    pub prefix: String,
}
