//! Common parts of benchmarks whose node programs join a mesh without any state.

use std::fs;

use anyhow::{Context, Result};
use fairlead_demo::{World, servers};
use serde_json::json;
use testbed_lab::relay::{Relay, TOKEN};
use testbed_lab::{Host, Process};

/// STUN servers and the relay.
pub(crate) struct Servers {
    _stun: [(Host, Process); 2],
    _relay: Relay,
}

impl Servers {
    /// Makes mesh and pods, and ends all node programs.
    pub(crate) fn prepare(world: &mut World) -> Result<Self> {
        let stun = [servers::stun_server(world, "stun-1")?, servers::stun_server(world, "stun-2")?];
        let relay = servers::relay(world)?;
        world.apply_pool()?;
        world.start_pods()?;
        world.nodes.iter_mut().try_for_each(|node| node.stop())?;
        let names = stun.each_ref().map(|(host, _)| format!("stun:{}", host.address()));
        servers::apply_token(world, TOKEN)?;
        servers::apply_mesh(world, &json!({ "stunServers": names, "relay": relay.spec("auto") }))?;
        Ok(Self { _stun: stun, _relay: relay })
    }
}

/// Deletes all WireKubePeers, and what these nodes keep on disk.
pub(crate) fn forget(world: &World, nodes: &[&str]) -> Result<()> {
    world.plane.kubectl(&["delete", "wirekubepeers", "--all", "--wait=true"])?;
    for node in world.nodes.iter().filter(|node| nodes.contains(&node.name.as_str())) {
        let state = node.directory.join("state");
        if state.exists() {
            fs::remove_dir_all(&state).with_context(|| format!("cannot remove {}", state.display()))?;
        }
    }
    Ok(())
}
