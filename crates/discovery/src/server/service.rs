//! The gRPC service over the core.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_wire::discovery::address_bytes;
use fairlead_wire::discovery::server::cluster_server::Cluster;
use fairlead_wire::discovery::server::{
    self as wire, AffiliateDeleteRequest, AffiliateDeleteResponse, AffiliateUpdateRequest,
    AffiliateUpdateResponse, HelloRequest, HelloResponse, ListRequest, ListResponse, RedirectMessage,
    WatchRequest, WatchResponse,
};
use futures::stream::Empty;
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Response, Status};

use super::connections::Caller;
use super::etcd::{Etcd, WriteError};
use super::state::{Shared, State, wake};
use super::statistics::Method;
use super::watching::{Handover, Watch};
use crate::core::{Refusal, Source, Update};

#[derive(Debug, Clone)]
pub(super) struct Service(pub(super) Arc<Shared>);

#[tonic::async_trait]
impl Cluster for Service {
    /// [`super::watching::Watching`] replaces it.
    type WatchStream = Empty<Result<WatchResponse, Status>>;

    async fn hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloResponse>, Status> {
        let caller = self.admit(Method::Hello, &request).await?;
        self.answer(|state| state.discovery.list(&request.get_ref().cluster_id).map(drop))?;
        let redirect = self.0.redirect.clone().map(|endpoint| RedirectMessage { endpoint });
        let ip = caller.filter(|_| self.0.reports_client_address);
        let client_ip = ip.map(address_bytes).unwrap_or_default().into();
        Ok(Response::new(HelloResponse { redirect, client_ip, tells_expiry: true }))
    }

    async fn affiliate_update(
        &self,
        request: Request<AffiliateUpdateRequest>,
    ) -> Result<Response<AffiliateUpdateResponse>, Status> {
        let caller = self.admit(Method::AffiliateUpdate, &request).await?;
        let request = request.into_inner();
        let update = Update {
            cluster: request.cluster_id,
            affiliate: request.affiliate_id,
            data: request.affiliate_data,
            endpoints: request.affiliate_endpoints,
            ttl: request.ttl.map(ttl).unwrap_or_default(),
        };
        match &self.0.etcd {
            None => self.answer(|state| state.discovery.update(source(caller), &update, Instant::now()))?,
            Some(etcd) => self.written(etcd.update(&self.0, source(caller), &update).await)?,
        }
        Ok(Response::new(AffiliateUpdateResponse {}))
    }

    async fn affiliate_delete(
        &self,
        request: Request<AffiliateDeleteRequest>,
    ) -> Result<Response<AffiliateDeleteResponse>, Status> {
        self.admit(Method::AffiliateDelete, &request).await?;
        let request = request.into_inner();
        let cluster = &request.cluster_id;
        let affiliate = &request.affiliate_id;
        match &self.0.etcd {
            None => self.answer(|state| state.discovery.delete(cluster, affiliate))?,
            Some(etcd) => self.written(etcd.delete(&self.0, cluster, affiliate).await)?,
        }
        Ok(Response::new(AffiliateDeleteResponse {}))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        self.admit(Method::List, &request).await?;
        let affiliates = self.answer(|state| state.discovery.list(&request.get_ref().cluster_id))?;
        Ok(Response::new(ListResponse { affiliates }))
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let caller = self.admit(Method::Watch, &request).await?;
        let connection = request.extensions().get::<Caller>().map_or(0, |caller| caller.connection);
        let cluster = request.into_inner().cluster_id;
        let id = self.answer(|state| state.discovery.watch(source(caller), &cluster, Instant::now()))?;
        let mut answer = Response::new(futures::stream::empty());
        answer.extensions_mut().insert(Handover::new(Watch::new(id, connection, Arc::clone(&self.0))));
        Ok(answer)
    }
}

impl Service {
    /// Counts a request, and has it wait for its turn.
    async fn admit<T>(&self, method: Method, request: &Request<T>) -> Result<Option<IpAddr>, Status> {
        self.0.statistics.count(method);
        if let Some(reason) = self.0.etcd.as_ref().and_then(Etcd::not_read) {
            return Err(Status::unavailable(reason));
        }
        let peer = request.extensions().get::<Caller>().map(|caller| caller.ip);
        let caller = peer.map(|peer| caller(peer, request.metadata(), &self.0));
        let wait = self.answer(|state| state.discovery.admit(source(caller), Instant::now()))?;
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        Ok(caller)
    }

    fn answer<T>(&self, act: impl FnOnce(&mut State) -> Result<T, Refusal>) -> Result<T, Status> {
        let mut state = self.0.state();
        let outcome = act(&mut state);
        let wakers = state.take_wakers();
        drop(state);
        // Without the lock: the tasks of watches need it.
        wake(wakers);
        outcome.map_err(|refusal| self.refuse(refusal))
    }

    fn written(&self, outcome: Result<(), WriteError>) -> Result<(), Status> {
        outcome.map_err(|error| match error {
            WriteError::Refused(refusal) => self.refuse(refusal),
            WriteError::Unavailable(reason) => Status::unavailable(reason),
        })
    }

    fn refuse(&self, refusal: Refusal) -> Status {
        self.0.statistics.count_refusal(refusal);
        let code = match refusal {
            Refusal::NotListed => Code::PermissionDenied,
            _ if refusal.is_invalid() => Code::InvalidArgument,
            _ => Code::ResourceExhausted,
        };
        Status::new(code, refusal.to_string())
    }
}

fn source(caller: Option<IpAddr>) -> Source {
    // Every connection has an address.
    Source::of(caller.unwrap_or(IpAddr::from([0; 4])))
}

/// A negative time has ended.
fn ttl(duration: wire::Duration) -> Duration {
    let seconds = u64::try_from(duration.seconds).ok();
    let nanos = u32::try_from(duration.nanos).ok().filter(|nanos| *nanos < 1_000_000_000);
    seconds.zip(nanos).map(|(seconds, nanos)| Duration::new(seconds, nanos)).unwrap_or_default()
}

/// Behind trusted proxies: what `X-Real-IP` says, else the last address of `X-Forwarded-For` that is none of them.
fn caller(peer: IpAddr, metadata: &MetadataMap, shared: &Shared) -> IpAddr {
    let is_trusted = |ip: &IpAddr| shared.trusted_proxies.iter().any(|proxy| proxy.contains(ip));
    if !is_trusted(&peer) {
        return peer;
    }
    let address = |text: &str| text.trim().parse::<IpAddr>().ok().map(|ip| ip.to_canonical());
    let real = metadata.get("x-real-ip").and_then(|value| value.to_str().ok()).and_then(address);
    let forwarded = || {
        let values = metadata.get_all("x-forwarded-for").iter().filter_map(|value| value.to_str().ok());
        let addresses: Vec<_> = values.flat_map(|value| value.split(',')).map(address).collect();
        addresses.into_iter().rev().map_while(|ip| ip).find(|ip| !is_trusted(ip))
    };
    real.or_else(forwarded).unwrap_or(peer)
}
