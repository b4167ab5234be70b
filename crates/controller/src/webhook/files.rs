//! Certificates that somebody else puts into a directory, such as a mounted Secret of cert-manager.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::certificates::Pair;
use super::server::Served;
use super::{CERTIFICATE, KEY};

/// How often the files are read. A kubelet takes a minute to bring a new Secret anyway.
const LOOK: Duration = Duration::from_secs(10);

/// Serves what the directory holds, for ever. What cannot be used changes nothing.
pub(super) async fn run(directory: PathBuf, served: Arc<Served>) {
    let mut complained = String::new();
    loop {
        let complaint =
            read(&directory, &served).await.err().map(|error| format!("{error:#}")).unwrap_or_default();
        if complaint != complained && !complaint.is_empty() {
            tracing::error!(error = complaint, "cannot use the webhook's certificate; will try again");
        }
        complained = complaint;
        tokio::time::sleep(LOOK).await;
    }
}

async fn read(directory: &Path, served: &Served) -> anyhow::Result<()> {
    use anyhow::Context as _;
    let certificate = directory.join(CERTIFICATE);
    let of = async |path: &Path| {
        tokio::fs::read(path).await.with_context(|| format!("cannot read {}", path.display()))
    };
    let (text, key) = (of(&certificate).await?, of(&directory.join(KEY)).await?);
    let unusable = || format!("{} and {KEY} beside it cannot be served", certificate.display());
    let pair = Pair::parse(&text, &key).with_context(unusable)?;
    served.replace(&pair).with_context(unusable)
}
