use std::sync::{Arc, Mutex};

use fairlead_netlink::route::MacAddress;
use fairlead_wire::cni::CniArgs;

use super::*;
use crate::cni::failure::Reason;

type Calls = Arc<Mutex<Vec<String>>>;

/// Writes down what is asked of it, and fails where the test says.
struct Fake {
    name: &'static str,
    attach_fails: bool,
    detach_fails: bool,
    calls: Calls,
}

impl Fake {
    fn call(&self, what: &str, fails: bool) -> Result<(), Failure> {
        let call = format!("{what} {}", self.name);
        self.calls.lock().unwrap().push(call.clone());
        if fails { Err(Failure::new(Reason::DataPlaneFailed, call)) } else { Ok(()) }
    }

    fn attach(&self) -> Result<(), Failure> {
        self.call("attach", self.attach_fails)
    }
}

#[tonic::async_trait]
impl Stage for Fake {
    async fn detach(&self, _: &Key) -> Result<(), Failure> {
        self.call("detach", self.detach_fails)
    }
}

#[tonic::async_trait]
impl FindEgress for Fake {
    async fn find(&self, _: &Attachment) -> Result<EgressRequest, Failure> {
        self.attach().map(|()| request())
    }
}

#[tonic::async_trait]
impl AllocateAddresses for Fake {
    async fn allocate(&self, _: &Attachment) -> Result<PodAddresses, Failure> {
        self.attach().map(|()| addresses())
    }

    fn allocated(&self, _: &Key) -> Result<Vec<IpAddr>, Failure> {
        self.call("check", self.attach_fails).map(|()| addresses().addresses.iter().collect())
    }
}

impl RecordAttachment for Fake {
    fn record(&self, _: &Key, _: Option<&str>) -> Result<(), Failure> {
        self.attach()
    }
}

#[tonic::async_trait]
impl ConnectPod for Fake {
    async fn connect(&self, _: &Attachment, allocated: &PodAddresses) -> Result<PodLinks, Failure> {
        assert_eq!(*allocated, addresses());
        self.attach().map(|()| links())
    }

    fn check(&self, _: &CheckContext, allocated: &[IpAddr]) -> Vec<String> {
        assert!(addresses().addresses.iter().eq(allocated.iter().copied()));
        self.call("check", false).unwrap();
        vec![self.name.to_owned()]
    }
}

#[tonic::async_trait]
impl SetUpEgress for Fake {
    async fn set_up(
        &self,
        _: &Attachment,
        interface: PodInterface,
        found: EgressRequest,
    ) -> Result<(), Failure> {
        let own = PodInterface { addresses: addresses().addresses, mtu: Some(1420) };
        let of_plugin =
            PodInterface { addresses: ["10.9.0.5".parse().unwrap()].into_iter().collect(), mtu: None };
        assert!([own, of_plugin].contains(&interface) && found == request());
        self.attach()
    }

    async fn check(&self, _: &Key) -> Result<Vec<String>, Failure> {
        self.call("check", self.attach_fails).map(|()| vec![self.name.to_owned()])
    }
}

fn request() -> EgressRequest {
    EgressRequest { uid: Some("u1".to_owned()), ..EgressRequest::default() }
}

fn addresses() -> PodAddresses {
    let addresses = ["10.1.0.5", "fd00:1::5"].map(|text| text.parse().unwrap()).into_iter().collect();
    PodAddresses { pool: "default".to_owned(), addresses }
}

fn links() -> PodLinks {
    PodLinks {
        container_mac: MacAddress([2, 0, 0, 0, 0, 1]),
        container_index: 2,
        host_name: "veth1".to_owned(),
        host_mac: MacAddress([2, 0, 0, 0, 0, 2]),
        host_index: 7,
        mtu: 1420,
        is_additional: false,
    }
}

const NAMES: [&str; 5] = ["request", "address", "record", "link", "tunnels"];

/// Stages of [`NAMES`], of which one fails to attach and one to detach; and what is asked of them.
fn stages(attach_fails: Option<usize>, detach_fails: Option<usize>) -> (Stages, Calls) {
    let calls = Calls::default();
    let mut fakes = NAMES.into_iter().enumerate().map(|(at, name)| {
        let attach_fails = attach_fails == Some(at);
        let detach_fails = detach_fails == Some(at);
        Box::new(Fake { name, attach_fails, detach_fails, calls: Arc::clone(&calls) })
    });
    let mut next = || fakes.next().unwrap();
    let stages = Stages {
        request: next(),
        address: next(),
        record: next(),
        link: next(),
        tunnels: next(),
        behind_plugin: false,
    };
    (stages, calls)
}

fn add_of(pod: &[(&str, &str)], stdin: &str) -> AddRequest {
    let args = pod.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let (container_id, ifname, netns) = ("c".to_owned(), "eth0".to_owned(), "/ns".to_owned());
    let stdin_data = stdin.as_bytes().to_vec();
    AddRequest::parse(CniArgs { container_id, ifname, netns, args, stdin_data, ..CniArgs::default() })
        .unwrap()
}

const POD: [(&str, &str); 2] = [("K8S_POD_NAMESPACE", "shop"), ("K8S_POD_NAME", "web")];
const CHAINED: (&str, &str) = ("IS_CHAINED", "true");

fn add() -> AddRequest {
    add_of(&POD, "{}")
}

fn calls(what: &str, names: impl IntoIterator<Item = &'static str>) -> Vec<String> {
    names.into_iter().map(|name| format!("{what} {name}")).collect()
}

#[tokio::test]
async fn add_runs_the_stages_in_order_and_del_in_reverse() {
    let (stages, asked) = stages(None, None);
    let add = add();
    let attached = stages.attach(&add, false).await.unwrap();
    let expected = result::result(add.attachment.as_ref().unwrap(), &addresses().addresses, &links());
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&attached).unwrap(), expected);
    assert_eq!(stages.detach(&add.key).await, Ok(()));
    let expected = [calls("attach", NAMES), calls("detach", NAMES.into_iter().rev())].concat();
    assert_eq!(*asked.lock().unwrap(), expected);
}

#[tokio::test]
async fn an_add_that_fails_at_any_stage_detaches_what_was_attached_in_reverse() {
    for (at, name) in NAMES.into_iter().enumerate() {
        let (stages, asked) = stages(Some(at), None);
        let failure = stages.attach(&add(), false).await.unwrap_err();
        assert_eq!(failure.message, format!("attach {name}"));
        let attached = || NAMES.into_iter().take(at + 1);
        let expected = [calls("attach", attached()), calls("detach", attached().rev())].concat();
        assert_eq!(*asked.lock().unwrap(), expected, "{at}");
    }
}

#[tokio::test]
async fn a_rollback_that_fails_stops_there_and_does_not_hide_the_first_error() {
    for undo in 0..NAMES.len() {
        let (stages, asked) = stages(Some(4), Some(undo));
        let failure = stages.attach(&add(), false).await.unwrap_err();
        assert_eq!(failure.message, "attach tunnels", "{undo}");
        let detached = NAMES.into_iter().skip(undo).rev();
        let expected = [calls("attach", NAMES), calls("detach", detached)].concat();
        assert_eq!(*asked.lock().unwrap(), expected, "{undo}");
    }
}

#[tokio::test]
async fn a_repeated_add_that_fails_keeps_what_the_first_one_made() {
    let (stages, asked) = stages(Some(2), None);
    let failure = stages.attach(&add(), true).await.unwrap_err();
    assert_eq!(failure.message, "attach record");
    assert_eq!(*asked.lock().unwrap(), calls("attach", ["request", "address", "record"]));
}

#[tokio::test]
async fn a_del_stops_at_the_stage_that_fails() {
    let (stages, asked) = stages(None, Some(1));
    let failure = stages.detach(&add().key).await.unwrap_err();
    assert_eq!(failure.message, "detach address");
    assert_eq!(*asked.lock().unwrap(), calls("detach", ["tunnels", "link", "record", "address"]));
}

#[tokio::test]
async fn check_collects_the_differences_of_all_stages() {
    let (stages, asked) = stages(None, None);
    let kernel = Inspection {
        host: None,
        led_to_pod: Vec::new(),
        pod: None,
        pod_routes: Vec::new(),
        connected: false,
    };
    let previous = Some(Previous::default());
    let context = CheckContext { key: add().key, netns: PathBuf::new(), previous, kernel };
    let unreported = "prevResult lists no interface eth0 in a sandbox";
    assert_eq!(stages.check(&context).await.unwrap(), ["link", "tunnels", unreported]);
    assert_eq!(*asked.lock().unwrap(), calls("check", ["address", "link", "tunnels"]));
    let behind_plugin = Stages { behind_plugin: true, ..stages };
    let differences = behind_plugin.check(&context).await.unwrap();
    assert_eq!(differences, ["the pod has no interface eth0", unreported, "tunnels"]);
}

#[tokio::test]
async fn an_add_of_no_pod_or_behind_another_plugin_makes_nothing() {
    let cases = [
        (add_of(&[], "{}"), "CNI_ARGS has no K8S_POD_NAMESPACE", &[][..]),
        (add_of(&[POD[0], POD[1], CHAINED], "{}"), "first plugin", &["request"][..]),
        (add_of(&[CHAINED], "{}"), "first plugin", &[][..]),
    ];
    for (add, message, attached) in cases {
        let (stages, asked) = stages(None, None);
        let failure = stages.attach(&add, false).await.unwrap_err();
        assert!(failure.message.contains(message), "{failure}");
        let expected = [calls("attach", attached.iter().copied()), calls("detach", ["address", "request"])];
        assert_eq!(*asked.lock().unwrap(), expected.concat());
    }
}

#[tokio::test]
async fn a_stage_that_only_detaches_makes_nothing() {
    let stdin = r#"{"prevResult": {"ips": [{"address": "10.9.0.5/24"}]}}"#;
    for (pod, attached) in [(&POD[..], &["request", "record", "tunnels"][..]), (&[], &["record"])] {
        let (own, asked) = stages(None, None);
        let stages = Stages { behind_plugin: true, ..own };
        let add = add_of(pod, stdin);
        let passed_on = stages.attach(&add, false).await.unwrap();
        assert_eq!(passed_on, br#"{"ips":[{"address":"10.9.0.5/24"}]}"#);
        assert_eq!(stages.detach(&add.key).await, Ok(()));
        let attached = calls("attach", attached.iter().copied());
        let expected = [attached, calls("detach", NAMES.into_iter().rev())].concat();
        assert_eq!(*asked.lock().unwrap(), expected);
    }
}

#[tokio::test]
async fn an_add_that_fails_behind_another_plugin_detaches_all_up_to_there() {
    let (own, asked) = stages(None, None);
    let stages = Stages { behind_plugin: true, ..own };
    let failure = stages.attach(&add(), false).await.unwrap_err();
    assert!(failure.message.contains("after another plugin"), "{failure}");
    let attached = calls("attach", ["request", "record"]);
    let expected = [attached, calls("detach", ["link", "record", "address", "request"])].concat();
    assert_eq!(*asked.lock().unwrap(), expected);
}
