//! Lines with which the operator of a discovery server admits nodes of Fairlead, also before they run.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use fairlead_api::names::{DISCOVERY_CLUSTER_ID, DISCOVERY_CLUSTER_SECRET};
use fairlead_discovery::client::node_id;
use fairlead_discovery::core::AdmissionList;
use k8s_openapi::ByteString;

use crate::saved::discovery::Credentials;

/// The lines of an admission file for these nodes, each below a comment with the name. The identifier and the secret of the cluster
/// are as the Secret has them.
///
/// # Errors
/// The identifier or the secret cannot be used, or a server could not read the lines.
pub fn lines(cluster_id: Vec<u8>, cluster_secret: Vec<u8>, nodes: &[String]) -> Result<String> {
    let data = [(DISCOVERY_CLUSTER_ID, cluster_id), (DISCOVERY_CLUSTER_SECRET, cluster_secret)];
    let data = data.map(|(key, value)| (key.to_owned(), ByteString(value))).into();
    let Credentials { cluster_id, secret } =
        Credentials::of_secret(&data).context("cannot use what the cluster shares for discovery services")?;
    let mut lines = String::new();
    for node in nodes {
        writeln!(lines, "# {node}\n{cluster_id} {}", node_id(&secret, node))?;
    }
    AdmissionList::parse(&lines).context("these nodes cannot be listed")?;
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_name_nodes_as_they_publish_themselves() {
        let secret = b"AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=\n".to_vec();
        let nodes = ["edge-1".to_owned(), "edge-2".to_owned()];
        let lines = lines(b"lab\n".to_vec(), secret.clone(), &nodes).unwrap();
        let ids = nodes.map(|node| node_id(&[2; 32], &node));
        assert_eq!(lines, format!("# edge-1\nlab {}\n# edge-2\nlab {}\n", ids[0], ids[1]));
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let secret = b"AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=".to_vec();
        let nodes = ["edge-1".to_owned()];
        let of =
            |id: &str, secret: &[u8]| format!("{:#}", lines(id.into(), secret.to_vec(), &nodes).unwrap_err());
        assert!(of("lab", b"short").contains("clusterSecret is not 32 bytes"), "{}", of("lab", b"short"));
        assert!(of("", &secret).contains("clusterID has not 1 to"));
        assert!(of("two words", &secret).contains("line 2"), "the file could not have it");
    }
}
