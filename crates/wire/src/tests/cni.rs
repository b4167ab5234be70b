use super::Kept;
use crate::cni::{AddResponse, CniArgs, CniError, ErrorCode, error_of, status_with_error};
use crate::network::{Attachment, GcRequest, GcResponse};

#[test]
fn messages_of_the_cni_plugin_are_as_they_were() {
    let mut kept = Kept::of("cni.txt");
    kept.has(
        "CNIArgs",
        CniArgs {
            container_id: "c0ffee".to_owned(),
            netns: "/var/run/netns/cni-1".to_owned(),
            ifname: "eth0".to_owned(),
            args: [("K8S_POD_NAME".to_owned(), "web-0".to_owned())].into(),
            path: "/opt/cni/bin".to_owned(),
            stdin_data: br#"{"cniVersion":"1.1.0"}"#.to_vec(),
            ips: vec!["10.244.1.7".to_owned(), "fd00:244::7".to_owned()],
            interfaces: [("eth0".to_owned(), true)].into(),
        },
    );
    kept.has("AddResponse", AddResponse { result: br#"{"ips":[]}"#.to_vec() });
    kept.has(
        "GcRequest",
        GcRequest {
            network: "k8s-pod-network".to_owned(),
            valid: vec![Attachment { container_id: "c0ffee".to_owned(), ifname: "eth0".to_owned() }],
        },
    );
    kept.has(
        "GcResponse",
        GcResponse {
            freed: vec![Attachment { container_id: "dead".to_owned(), ifname: "net1".to_owned() }],
            failures: vec!["cannot free 10.244.1.9".to_owned()],
        },
    );
    let error = CniError {
        code: ErrorCode::AttachmentChanged.into(),
        msg: "eth0 has another address".to_owned(),
        details: "10.244.1.8".to_owned(),
    };
    kept.has("CNIError", error.clone());
    let status = status_with_error(tonic::Code::Internal, error.clone());
    let bytes = kept.same("grpc-status-details-bin", status.details().to_vec());
    let received = tonic::Status::with_details(tonic::Code::Internal, "", bytes.into());
    assert_eq!(error_of(&received), Some(error));
}
