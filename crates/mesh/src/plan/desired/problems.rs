//! Problems of the wanted mesh: parts of it that this node cannot have.

use fairlead_address::{PrefixSet, is_reachable, without_nat64};
use fairlead_members::SourceProblem;
use fairlead_members::cluster_addresses::UnusableAddress;
use fairlead_path::StunAnswer;
use fairlead_topology::Plan;

use super::StunAnswers;
use crate::model::inputs::Inputs;
use crate::model::problem::MeshProblem;

pub(super) fn problems(
    inputs: &Inputs,
    plan: &Plan,
    stun: &StunAnswers,
    inside: &PrefixSet,
) -> Vec<MeshProblem> {
    let open =
        plan.problems.iter().filter(|problem| !problem.is_solved_by(&inputs.settings.routing.excluded));
    let read = inputs.problems.iter().cloned().map(MeshProblem::Source);
    let refused = inputs
        .network
        .port_mappings
        .refusals()
        .map(|(gateway, failure)| MeshProblem::PortMappingRefused { gateway, failure: failure.clone() });
    let unusable = unusable_endpoints(inputs, inside).map(MeshProblem::Source);
    let waits = inputs.settings.locations.waits.iter().cloned();
    read.chain(open.cloned().map(MeshProblem::Plan))
        .chain(waits.map(|message| MeshProblem::GranularityPending { message }))
        .chain(stun_problems(inputs, stun))
        .chain(refused)
        .chain(unusable)
        .collect()
}

/// Endpoints that administrators chose for other members, and that no node can have. An endpoint at which a node saw itself or others is
/// left out silently: no administrator can change it.
fn unusable_endpoints(inputs: &Inputs, inside: &PrefixSet) -> impl Iterator<Item = SourceProblem> {
    let others = inputs.members.iter().filter(|member| member.name != inputs.node);
    others.filter_map(move |member| {
        let manual = member.endpoints.manual.as_ref()?;
        let resolved = || inputs.resolved.get(manual).and_then(|addresses| addresses.first()).copied();
        let address = without_nat64(&[], manual.address().or_else(resolved)?).ip().to_canonical();
        // Which block or range it is in takes a look at all of them.
        if is_reachable(address) && !inside.contains(address) {
            return None;
        }
        let why = UnusableAddress::of(address, &inputs.members, &inputs.services)?;
        let peer = member.name.clone();
        Some(SourceProblem::UnusablePeerEndpoint { peer, value: manual.to_string(), why })
    })
}

/// Servers whose answer is unusable. One that does not answer is a problem only if none does: it may be of a family that
/// this host does not have.
fn stun_problems(inputs: &Inputs, stun: &StunAnswers) -> Vec<MeshProblem> {
    let Some(stun) = stun else {
        let asked_for = !inputs.settings.traversal.stun_servers.is_empty();
        return asked_for.then_some(MeshProblem::StunUnavailable).into_iter().collect();
    };
    let unusable = stun.iter().filter_map(|(server, answer)| match answer {
        StunAnswer::Refused(code) => {
            Some(MeshProblem::StunServer { server: *server, what: format!("refuses with {code}") })
        }
        StunAnswer::Invalid(address) => {
            let what = format!("says that this node is at {address}, which no packet can come from");
            Some(MeshProblem::StunServer { server: *server, what })
        }
        StunAnswer::Mapped(_) | StunAnswer::Missing => None,
    });
    let is_silent = !stun.is_empty() && stun.values().all(|answer| *answer == StunAnswer::Missing);
    let silent = is_silent.then(|| MeshProblem::NoStunAnswer { servers: stun.keys().copied().collect() });
    unusable.chain(silent).collect()
}
