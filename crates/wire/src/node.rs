//! The status contract (`proto/node.proto`).

generated!("fairlead.node.v1");
