//! Claims in BlockRequests, and the objects and conditions that answer them. Pure.

use fairlead_api::names::{COIL_FINALIZER, LABEL_NODE, LABEL_POOL, LABEL_REQUEST};
use fairlead_api::resources::{
    AddressBlock, AddressBlockFields, AddressPool, BlockRequest, BlockRequestCondition,
    BlockRequestConditionType, ConditionStatus, InvalidName,
};
use fairlead_ipam::grant::REASON_ALLOCATED;
use fairlead_ipam::{ClaimedBlock, DualStackNets, Refusal};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};

/// The claim of a request, whose fields an older schema may have let in.
pub(super) fn parse(request: &BlockRequest) -> Result<Option<ClaimedBlock>, Refusal> {
    request.check_names().map_err(|InvalidName { field, text }| Refusal::InvalidRequest { field, text })?;
    let claim = |fields: &AddressBlockFields| {
        let nets = fields
            .parse()
            .map_err(|error| Refusal::InvalidRequest { field: "inUse", text: error.to_string() })?;
        Ok(ClaimedBlock { index: fields.index, nets })
    };
    request.spec.in_use.as_ref().map(claim).transpose()
}

/// The block that answers `request`.
pub(super) fn new_block(
    request: &BlockRequest,
    pool: &AddressPool,
    index: u32,
    name: &str,
    nets: &DualStackNets,
) -> AddressBlock {
    let labels = [
        (LABEL_POOL, request.spec.pool_name.clone()),
        (LABEL_NODE, request.spec.node_name.clone()),
        (LABEL_REQUEST, request.uid().unwrap_or_default()),
    ];
    let owner = pool
        .controller_owner_ref(&())
        .map(|owner| OwnerReference { block_owner_deletion: Some(true), ..owner });
    let fields = AddressBlockFields {
        index,
        ipv4: nets.ipv4.map(|net| net.to_string()),
        ipv6: nets.ipv6.map(|net| net.to_string()),
    };
    let mut block = AddressBlock::new(name, fields);
    block.metadata = ObjectMeta {
        name: Some(name.to_owned()),
        labels: Some(labels.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
        finalizers: Some(vec![COIL_FINALIZER.to_owned()]),
        owner_references: owner.map(|owner| vec![owner]),
        ..ObjectMeta::default()
    };
    block
}

/// `Complete` for every answer, and `Failed` for a refusal, as Coil writes them.
pub(super) fn conditions(
    outcome: &Result<String, Refusal>,
    now: jiff::Timestamp,
) -> Vec<BlockRequestCondition> {
    let (reason, message) = match outcome {
        Ok(block) => (REASON_ALLOCATED, format!("allocated a block {block}")),
        Err(refusal) => (refusal.reason().as_condition(), refusal.to_string()),
    };
    let condition = |type_| BlockRequestCondition {
        type_,
        status: ConditionStatus::True,
        last_probe_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
        reason: reason.to_owned(),
        message: message.clone(),
    };
    let failed = outcome.is_err().then(|| condition(BlockRequestConditionType::Failed));
    [condition(BlockRequestConditionType::Complete)].into_iter().chain(failed).collect()
}
