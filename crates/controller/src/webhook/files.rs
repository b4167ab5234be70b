//! Certificates that something else puts into a directory, such as a mounted Secret of cert-manager.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::certificates::Pair;
use super::server::Served;
use super::{CERTIFICATE, KEY};

/// Interval of reading the files. A kubelet takes a minute to mount a changed Secret anyway.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Serves the directory's certificate forever. An unusable one changes nothing.
pub(super) async fn run(directory: PathBuf, served: Arc<Served>) {
    let mut logged: Option<String> = None;
    loop {
        let error = read(&directory, &served).await.err().map(|error| format!("{error:#}"));
        if let Some(error) = error.as_ref().filter(|error| logged.as_ref() != Some(error)) {
            tracing::error!(error, "cannot use the webhook's certificate; retrying");
        }
        logged = error;
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn read(directory: &Path, served: &Served) -> anyhow::Result<()> {
    use anyhow::Context as _;
    let certificate = directory.join(CERTIFICATE);
    let content = async |path: &Path| {
        tokio::fs::read(path).await.with_context(|| format!("cannot read {}", path.display()))
    };
    let (text, key) = (content(&certificate).await?, content(&directory.join(KEY)).await?);
    let unusable = || format!("{} and {KEY} in the same directory are unusable", certificate.display());
    let pair = Pair::parse(&text, &key).with_context(unusable)?;
    served.replace(&pair).with_context(unusable)
}
