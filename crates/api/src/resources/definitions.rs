//! The CustomResourceDefinitions as they are installed.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt;

use super::{
    AddressBlock, AddressPool, BlockRequest, Egress, KiloPeer, WireKubeMesh, WireKubePeer, not_implemented,
};

/// All CustomResourceDefinitions, ready to be installed, in the order of their names.
///
/// They differ from the derived ones in that no field is nullable (a field is there or it is not, so rules can
/// rely on `has()`), and in that they say which fields are [not implemented](not_implemented).
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
        schemas.filter_map(|schema| schema.open_api_v3_schema.as_mut()).for_each(forbid_null);
        not_implemented::explain(definition);
    }
    all.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    all
}

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
