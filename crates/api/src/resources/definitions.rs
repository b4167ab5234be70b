//! The CustomResourceDefinitions as they are installed.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt;

use crate::conditions::MAX_CONDITION_MESSAGE;

use super::{
    AddressBlock, AddressPool, BlockRequest, Egress, KiloPeer, WireKubeMesh, WireKubePeer, not_implemented,
};

/// All CustomResourceDefinitions, ready to be installed, in the order of their names.
///
/// They differ from the derived ones in that no field is nullable (a field is there or it is not, so rules can
/// rely on `has()`), in that conditions are bounded, whose type is Kubernetes's, and in that they say which fields are
/// [not implemented](not_implemented).
///
/// Every list, map and string has a bound, several times what a large cluster needs, so that one token cannot fill etcd or the memory of
/// those who watch. An object that was stored with more keeps it: the API server judges only parts that a write changes (ratcheting, since
/// Kubernetes 1.30).
pub fn definitions() -> Vec<CustomResourceDefinition> {
    let mut all = vec![
        AddressBlock::crd(),
        AddressPool::crd(),
        BlockRequest::crd(),
        Egress::crd(),
        KiloPeer::crd(),
        WireKubeMesh::crd(),
        WireKubePeer::crd(),
    ];
    for definition in &mut all {
        let schemas = definition.spec.versions.iter_mut().filter_map(|version| version.schema.as_mut());
        for schema in schemas.filter_map(|schema| schema.open_api_v3_schema.as_mut()) {
            forbid_null(schema);
            bound_conditions(schema);
        }
        not_implemented::explain(definition);
    }
    all.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    all
}

/// Bounds `status.conditions`, of which an object has some ten. `type` and `reason` are as long as Kubernetes permits in its own objects.
fn bound_conditions(schema: &mut JSONSchemaProps) {
    let Some(conditions) = ["status", "conditions"]
        .iter()
        .try_fold(schema, |schema, name| schema.properties.as_mut()?.get_mut(*name))
    else {
        return;
    };
    conditions.max_items = Some(MAX_CONDITIONS);
    let Some(JSONSchemaPropsOrArray::Schema(condition)) = &mut conditions.items else { return };
    for (name, property) in condition.properties.iter_mut().flatten() {
        property.max_length = match name.as_str() {
            "message" => i64::try_from(MAX_CONDITION_MESSAGE).ok(),
            "reason" => Some(1024),
            "status" if property.enum_.is_none() => Some(64),
            "type" if property.enum_.is_none() => Some(316),
            _ => None,
        };
    }
}

/// Most conditions of an object.
const MAX_CONDITIONS: i64 = 32;

fn forbid_null(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    schema.properties.iter_mut().flat_map(|properties| properties.values_mut()).for_each(forbid_null);
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(item)) => forbid_null(item),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items.iter_mut().for_each(forbid_null),
        None => {}
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        forbid_null(values);
    }
}
