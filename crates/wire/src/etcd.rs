//! The part of etcd's gRPC API that replicas of the discovery server call (`proto/etcd.proto`). Clients only.

generated!("etcdserverpb");
