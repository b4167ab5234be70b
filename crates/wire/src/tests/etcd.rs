use prost::bytes::Bytes;

use super::Kept;
use crate::etcd::{
    Compare, DeleteRangeRequest, DeleteRangeResponse, Event, KeyValue, LeaseGrantRequest, LeaseGrantResponse,
    LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, PutRequest, PutResponse, RangeRequest, RangeResponse,
    RequestOp, ResponseHeader, ResponseOp, TxnRequest, TxnResponse, WatchCreateRequest, WatchProgressRequest,
    WatchRequest, WatchResponse, compare, event, request_op, response_op, watch_request,
};

const KEY: Bytes = Bytes::from_static(b"/fairlead/key");

fn header() -> Option<ResponseHeader> {
    Some(ResponseHeader { cluster_id: 5, revision: 1000, raft_term: 2 })
}

fn pair() -> KeyValue {
    KeyValue { key: KEY, mod_revision: 999, value: Bytes::from_static(b"value"), lease: 77 }
}

#[test]
fn messages_to_etcd_are_as_they_were() {
    let mut kept = Kept::of("etcd.txt");
    let range =
        RangeRequest { key: KEY, range_end: Bytes::from_static(b"/fairlead0"), limit: 50, revision: 1000 };
    kept.has("RangeRequest", range.clone());
    let ranged = RangeResponse { header: header(), kvs: vec![pair()], more: true };
    kept.has("RangeResponse", ranged.clone());
    kept.has("DeleteRangeRequest", DeleteRangeRequest { key: KEY });
    kept.has("DeleteRangeResponse", DeleteRangeResponse { header: header(), deleted: 1 });
    let put = PutRequest { key: KEY, value: Bytes::from_static(b"value"), lease: 77 };
    let comparison = Compare {
        result: compare::CompareResult::Equal.into(),
        target: compare::CompareTarget::Mod.into(),
        key: KEY,
        target_union: Some(compare::TargetUnion::ModRevision(999)),
    };
    let txn = TxnRequest {
        compare: vec![comparison],
        success: vec![RequestOp { request: Some(request_op::Request::RequestPut(put)) }],
        failure: vec![RequestOp { request: Some(request_op::Request::RequestRange(range)) }],
    };
    kept.has("TxnRequest", txn);
    let put = response_op::Response::ResponsePut(PutResponse { header: header() });
    let range = response_op::Response::ResponseRange(ranged);
    let responses = [put, range].map(|response| ResponseOp { response: Some(response) }).into();
    kept.has("TxnResponse", TxnResponse { header: header(), succeeded: true, responses });
    let create = WatchCreateRequest {
        key: KEY,
        range_end: Bytes::from_static(b"/fairlead0"),
        start_revision: 1001,
        fragment: true,
    };
    let request = |union| WatchRequest { request_union: Some(union) };
    kept.has("WatchRequest create", request(watch_request::RequestUnion::CreateRequest(create)));
    let progress = watch_request::RequestUnion::ProgressRequest(WatchProgressRequest {});
    kept.has("WatchRequest progress", request(progress));
    kept.has(
        "WatchResponse",
        WatchResponse {
            header: header(),
            created: true,
            canceled: true,
            compact_revision: 500,
            cancel_reason: "compacted".to_owned(),
            events: vec![
                Event { r#type: event::EventType::Put.into(), kv: Some(pair()) },
                Event { r#type: event::EventType::Delete.into(), kv: Some(pair()) },
            ],
        },
    );
    kept.has("LeaseGrantRequest", LeaseGrantRequest { ttl: 60 });
    kept.has("LeaseGrantResponse", LeaseGrantResponse { id: 77, ttl: 60, error: "none".to_owned() });
    kept.has("LeaseTimeToLiveRequest", LeaseTimeToLiveRequest { id: 77 });
    kept.has("LeaseTimeToLiveResponse", LeaseTimeToLiveResponse { id: 77, ttl: -1, granted_ttl: 60 });
}
