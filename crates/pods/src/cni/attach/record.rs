//! The files beside the socket that name the attachment: see [`crate::cni::records`].

use fairlead_ipam::Key;

use super::{RecordAttachment, Stage};
use crate::cni::failure::{Failure, Reason};
use crate::cni::records::Records;

/// Records attachments, before the kernel has anything of them, so that GC finds also what a crash left.
pub(in crate::cni) struct RecordStage {
    pub(in crate::cni) records: Records,
}

impl RecordAttachment for RecordStage {
    /// GC removes only what is recorded of its network: nothing is behind another plugin.
    fn record(&self, key: &Key, network: Option<&str>) -> Result<(), Failure> {
        // A DEL that is pending from before must not remove what is made now.
        self.records.remove_pending(key).map_err(|error| {
            let message = "cannot cancel a pending DEL of this container";
            Failure::new(Reason::RecordsUnusable, message).details(error)
        })?;
        if let Some(network) = network
            && let Err(error) = self.records.add(network, key)
        {
            tracing::warn!(container = key.container_id, %error, "GC will not find this attachment");
        }
        Ok(())
    }
}

#[tonic::async_trait]
impl Stage for RecordStage {
    async fn detach(&self, key: &Key) -> Result<(), Failure> {
        if let Err(error) = self.records.remove(key).and_then(|()| self.records.remove_pending(key)) {
            tracing::warn!(container = key.container_id, %error, "a record of a removed attachment remains");
        }
        Ok(())
    }
}
