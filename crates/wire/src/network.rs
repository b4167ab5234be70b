//! The CNI operations on a whole network (`proto/network.proto`).

generated!("fairlead.cni.v1");
