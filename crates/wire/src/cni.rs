//! The CNI contract (`proto/cni.proto`), wire-compatible with Coil v2, and the encoding of its errors.

use prost::Message;

use crate::status::{Any, Status};

generated!("pkg.cnirpc");

/// Full protobuf name of [`CniError`].
const ERROR_NAME: &str = "pkg.cnirpc.CNIError";
/// The prefix that grpc-go's `Status.WithDetails` puts before that name.
const TYPE_URL_PREFIX: &str = "type.googleapis.com/";

/// A gRPC status of `code` that carries `error` as its only detail, as grpc-go's `Status.WithDetails` encodes it.
///
/// The status message is the error's `msg`, for clients that do not decode the details.
pub fn status_with_error(code: tonic::Code, error: CniError) -> tonic::Status {
    let message = error.msg.clone();
    let detail = Any { type_url: format!("{TYPE_URL_PREFIX}{ERROR_NAME}"), value: error.encode_to_vec() };
    let status = Status { code: i32::from(code), message: message.clone(), details: vec![detail] };
    tonic::Status::with_details(code, message, status.encode_to_vec().into())
}

/// The CNI error inside a gRPC status: the first detail of that type that can be decoded, if there is one.
///
/// The details come from another process: `None` if they cannot be decoded.
pub fn error_of(status: &tonic::Status) -> Option<CniError> {
    let details = Status::decode(status.details()).ok()?.details;
    details
        .iter()
        .filter(|detail| is_error(&detail.type_url))
        .find_map(|detail| CniError::decode(detail.value.as_slice()).ok())
}

/// The type is named after the last slash (google/protobuf/any.proto).
fn is_error(type_url: &str) -> bool {
    type_url.rsplit_once('/').is_some_and(|(_, name)| name == ERROR_NAME)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn error(code: ErrorCode, msg: &str, details: &str) -> CniError {
        CniError { code: code.into(), msg: msg.to_owned(), details: details.to_owned() }
    }

    /// Written by hand from the protobuf encoding rules, as grpc-go marshals
    /// `status.New(codes.Internal, "no block").WithDetails(&CNIError{Code: 11, Msg: "no block", Details: "pool x"})`.
    fn as_grpc_go_sends_it() -> Vec<u8> {
        let mut error = vec![0x08, 11, 0x12, 8];
        error.extend(b"no block");
        error.extend([0x1a, 6]);
        error.extend(b"pool x");
        let type_url = b"type.googleapis.com/pkg.cnirpc.CNIError";
        let mut any = vec![0x0a, u8::try_from(type_url.len()).unwrap()];
        any.extend(type_url);
        any.extend([0x12, u8::try_from(error.len()).unwrap()]);
        any.extend(error);
        let mut status = vec![0x08, 13, 0x12, 8];
        status.extend(b"no block");
        status.extend([0x1a, u8::try_from(any.len()).unwrap()]);
        status.extend(any);
        status
    }

    #[test]
    fn the_bytes_are_those_of_grpc_go() {
        let status =
            status_with_error(tonic::Code::Internal, error(ErrorCode::TryAgainLater, "no block", "pool x"));
        assert_eq!(status.code(), tonic::Code::Internal);
        assert_eq!(status.message(), "no block");
        assert_eq!(status.details(), as_grpc_go_sends_it());
    }

    #[test]
    fn an_error_is_read_back_from_the_trailers() {
        let sent = error(ErrorCode::UnknownContainer, "pod a/b: not found", "größer\n");
        let headers =
            status_with_error(tonic::Code::NotFound, sent.clone()).into_http::<()>().into_parts().0.headers;
        assert!(headers.contains_key("grpc-status-details-bin"));
        let received = tonic::Status::from_header_map(&headers).unwrap();
        assert_eq!(received.code(), tonic::Code::NotFound);
        assert_eq!(error_of(&received), Some(sent));
    }

    #[test]
    fn other_details_are_skipped() {
        let wanted = error(ErrorCode::Internal, "m", "");
        let details = vec![
            Any { type_url: "type.googleapis.com/google.rpc.RetryInfo".into(), value: vec![1, 2, 3] },
            Any { type_url: ERROR_NAME.into(), value: wanted.encode_to_vec() },
            Any { type_url: format!("{TYPE_URL_PREFIX}{ERROR_NAME}"), value: vec![0xff] },
            Any { type_url: format!("example.org/{ERROR_NAME}"), value: wanted.encode_to_vec() },
        ];
        let bytes = Status { code: 13, message: String::new(), details }.encode_to_vec();
        let status = tonic::Status::with_details(tonic::Code::Internal, "", bytes.into());
        assert_eq!(error_of(&status), Some(wanted));
    }

    #[test]
    fn a_status_without_details_has_no_error() {
        assert_eq!(error_of(&tonic::Status::internal("plain")), None);
    }

    proptest! {
        #[test]
        fn every_error_is_read_back(grpc in 1..17i32, code: i32, msg: String, details: String) {
            let sent = CniError { code, msg, details };
            let status = status_with_error(tonic::Code::from(grpc), sent.clone());
            prop_assert_eq!(error_of(&status), Some(sent));
        }

        #[test]
        fn hostile_details_never_panic(bytes: Vec<u8>) {
            error_of(&tonic::Status::with_details(tonic::Code::Unknown, "", bytes.into()));
        }

        #[test]
        fn a_flipped_byte_never_panics(at in any::<prop::sample::Index>(), byte: u8) {
            let mut bytes = as_grpc_go_sends_it();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            error_of(&tonic::Status::with_details(tonic::Code::Unknown, "", bytes.into()));
        }
    }
}
