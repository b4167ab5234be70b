//! `fairlead key`: replaces the WireGuard key of this node.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use fairlead_wire::node::node_client::NodeClient;
use fairlead_wire::node::{RotateKeyRequest, RotateKeyResponse, StatusRequest};
use tokio::time::{sleep, timeout};
use tonic::transport::Channel;

use crate::arguments::queries::{KeyCommand, KeyRotateArguments};
use crate::query::{connect, current_thread};

/// Interval at which the node is asked whether its key is in use.
const INTERVAL: Duration = Duration::from_millis(500);

/// Begins the rotation of the key, and says what happens.
///
/// # Errors
/// The node program refuses or does not answer, or the next key is not in use in the time that was given.
pub fn run(KeyCommand::Rotate(arguments): &KeyCommand) -> anyhow::Result<ExitCode> {
    let text = current_thread(rotate(arguments))?;
    // A closed pipe (`| head`) is not a failure.
    drop(writeln!(std::io::stdout(), "{text}"));
    Ok(ExitCode::SUCCESS)
}

async fn rotate(arguments: &KeyRotateArguments) -> anyhow::Result<String> {
    let mut node = connect(&arguments.socket).await?;
    let request = RotateKeyRequest { force: arguments.force };
    let begun =
        node.rotate_key(request).await.map_err(|status| anyhow!("{}", status.message()))?.into_inner();
    let Some(longest) = arguments.wait else { return Ok(sentence(&begun, "will be replaced by")) };
    timeout(longest, in_use(&mut node, &begun.next_public_key)).await.with_context(|| {
        format!("the next key is not in use after {longest:?}; `fairlead status` says why")
    })??;
    Ok(sentence(&begun, "was replaced by"))
}

async fn in_use(node: &mut NodeClient<Channel>, key: &str) -> anyhow::Result<()> {
    loop {
        let status =
            node.status(StatusRequest::default()).await.map_err(|status| anyhow!("{}", status.message()))?;
        if status.into_inner().public_key == key {
            return Ok(());
        }
        sleep(INTERVAL).await;
    }
}

fn sentence(begun: &RotateKeyResponse, happens: &str) -> String {
    let RotateKeyResponse { node, public_key, next_public_key, external_peers } = begun;
    let mut text = format!("the key {public_key} of node '{node}' {happens} {next_public_key}");
    if !external_peers.is_empty() {
        let peers = external_peers.join(", ");
        text.push_str(&format!(
            "\nthese Peers need another configuration then (`fairlead peer show`): {peers}"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::tests::command;

    #[test]
    fn peers_that_need_another_configuration_are_named() {
        let begun = RotateKeyResponse {
            node: "n1".to_owned(),
            public_key: "A".to_owned(),
            next_public_key: "B".to_owned(),
            external_peers: vec!["phone".to_owned(), "laptop".to_owned()],
        };
        let text = sentence(&begun, "will be replaced by");
        assert!(text.starts_with("the key A of node 'n1' will be replaced by B\n"), "{text}");
        assert!(text.ends_with("phone, laptop"), "{text}");
    }

    #[test]
    fn the_time_to_wait_is_a_duration() {
        let parse = command::<KeyCommand>;
        assert!(parse("").is_err() && parse("rotate --wait soon").is_err());
        let KeyCommand::Rotate(arguments) = parse("rotate --force --wait 2m").unwrap();
        assert_eq!((arguments.force, arguments.wait), (true, Some(Duration::from_secs(120))));
    }
}
