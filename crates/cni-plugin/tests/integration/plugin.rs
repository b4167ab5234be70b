//! Runs the built executable as a container runtime does: environment and standard input in, standard output out.
//!
//! Only the node program is fake: [`FakeNode`] serves the real contract on a real UNIX socket with a test's answers.

use fairlead_wire::cni::{self, CniError, ErrorCode};
use fairlead_wire::network::{Attachment, GcRequest, GcResponse};
use fairlead_wire::spool;
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::fake;
use crate::fake::{Call, FakeNode, Plugin};

const RESULT: &str = r#"{
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/ns"}, {"name": "veth1"}],
    "ips": [{"address": "10.100.0.5/32", "interface": 0}, {"address": "fd02::5/128", "interface": 0}],
    "dns": {}
}"#;

fn error_code(output: &fake::Output) -> u64 {
    assert!(!output.success, "expected an error, got {}", output.stdout);
    output.json()["code"].as_u64().unwrap()
}

#[tokio::test]
async fn add_returns_the_result_in_the_requested_version() {
    let node = FakeNode::start(|_| Ok(RESULT.into()));
    for (version, family) in
        [("0.3.1", json!("4")), ("0.4.0", json!("4")), ("1.0.0", Value::Null), ("1.1.0", Value::Null)]
    {
        let output = Plugin::new("ADD").conf(&node.conf(version)).run().await;
        assert!(output.success, "{output:?}");
        let result = output.json();
        assert_eq!(result["cniVersion"], version);
        assert_eq!(
            result["interfaces"][0],
            json!({"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/ns"})
        );
        assert_eq!(result["ips"][0]["address"], "10.100.0.5/32");
        assert_eq!(result["ips"][1]["address"], "fd02::5/128");
        assert_eq!(result["ips"][0]["version"], family);
        assert_eq!(output.stderr, "");
    }
}

#[tokio::test]
async fn add_passes_everything_to_the_node_program() {
    let node = FakeNode::start(|_| Ok(RESULT.into()));
    let conf = node.conf("1.0.0");
    let output = Plugin::new("ADD")
        .env("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;X=y")
        .env("CNI_PATH", "/opt/cni/bin")
        .conf(&conf)
        .run()
        .await;
    assert!(output.success, "{output:?}");
    let calls = node.calls();
    let [Call { method: "Add", args, timeout: Some(timeout) }] = calls.as_slice() else {
        panic!("{calls:?}")
    };
    assert_eq!((args.container_id.as_str(), args.netns.as_str()), ("c0ffee", "/nonexistent/netns"));
    assert_eq!((args.ifname.as_str(), args.path.as_str()), ("eth0", "/opt/cni/bin"));
    assert_eq!(args.args["K8S_POD_NAMESPACE"], "shop");
    assert_eq!(args.args["K8S_POD_NAME"], "web-0");
    assert_eq!(args.args["IS_CHAINED"], "false");
    assert_eq!(args.args.len(), 3);
    assert_eq!(args.stdin_data, conf.to_string().into_bytes());
    assert!(timeout.starts_with("60"), "60 s in some unit of the gRPC specification: {timeout}");
}

#[tokio::test]
async fn a_chained_add_passes_the_previous_result_through() {
    let node = FakeNode::start(|_| Ok(b"null".to_vec()));
    let mut conf = node.conf("0.4.0");
    conf["prevResult"] = json!({
        "cniVersion": "0.4.0",
        "interfaces": [{"name": "cni0"}, {"name": "eth0", "sandbox": "/ns"}],
        "ips": [{"version": "4", "address": "10.1.2.3/24", "gateway": "10.1.2.1", "interface": 1}],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dns": {},
    });
    let output = Plugin::new("ADD").conf(&conf).run().await;
    assert!(output.success, "{output:?}");
    assert_eq!(output.json(), conf["prevResult"]);
    let calls = node.calls();
    let args = &calls[0].args;
    assert_eq!(args.args["IS_CHAINED"], "true");
    assert_eq!(args.ips, ["10.1.2.3"]);
    assert_eq!(args.interfaces, [("cni0".to_owned(), false), ("eth0".to_owned(), true)].into());
}

#[tokio::test]
async fn the_node_program_may_refuse_a_chained_add() {
    let node = FakeNode::start(|_| {
        let error = CniError {
            code: ErrorCode::InvalidNetworkConfig.into(),
            msg: "must be the first plugin".into(),
            details: "move it up".into(),
        };
        Err(cni::status_with_error(Code::Internal, error))
    });
    let mut conf = node.conf("0.3.1");
    conf["prevResult"] = json!({"interfaces": [{"name": "cni0"}]});
    let output = Plugin::new("ADD").conf(&conf).run().await;
    assert!(!output.success);
    let expected =
        json!({"cniVersion": "0.3.1", "code": 7, "msg": "must be the first plugin", "details": "move it up"});
    assert_eq!(output.json(), expected);
}

#[tokio::test]
async fn del_is_silent_and_needs_no_namespace() {
    let node = FakeNode::start(|_| Ok(Vec::new()));
    let mut conf = node.conf("0.4.0");
    conf["prevResult"] = json!({"ips": "nonsense"});
    let output = Plugin::new("DEL").without("CNI_NETNS").conf(&conf).run().await;
    assert!(output.success, "{output:?}");
    assert_eq!(output.stdout, "");
    assert!(output.stderr.contains("prevResult"), "the log names it: {}", output.stderr);
    let calls = node.calls();
    assert_eq!(calls[0].method, "Del");
    assert_eq!(calls[0].args.netns, "");
}

#[tokio::test]
async fn version_needs_neither_environment_nor_input() {
    let output = Plugin::bare().env("CNI_COMMAND", "VERSION").stdin(b"{ not json").run().await;
    assert!(output.success);
    let expected = json!({"cniVersion": "1.1.0", "supportedVersions": ["0.3.1", "0.4.0", "1.0.0", "1.1.0"]});
    assert_eq!(output.json(), expected);
}

#[tokio::test]
async fn without_a_command_it_prints_its_name_to_standard_error() {
    let output = Plugin::bare().run().await;
    assert!(output.success);
    assert_eq!(output.stdout, "");
    assert!(output.stderr.contains("0.3.1, 0.4.0, 1.0.0, 1.1.0"), "{}", output.stderr);
}

#[tokio::test]
async fn errors_before_the_call_have_the_codes_of_the_specification() {
    let conf = |version: &str| json!({"cniVersion": version, "name": "n", "socket": "/nonexistent/x.sock"});
    let good = conf("1.0.0");
    let mut unusable_list = conf("1.1.0");
    unusable_list["cni.dev/valid-attachments"] = json!([{"containerID": 1}]);
    let cases = [
        (Plugin::new("UPDATE").conf(&good), 4),
        (Plugin::bare().env("CNI_COMMAND", "ADD").conf(&good), 4),
        (Plugin::new("ADD").env("CNI_CONTAINERID", "../x").conf(&good), 4),
        (Plugin::new("ADD").env("CNI_IFNAME", "a/b").conf(&good), 4),
        (Plugin::new("ADD").env("CNI_ARGS", "nonsense").conf(&good), 4),
        (Plugin::new("ADD").stdin(b"{ not json"), 6),
        (Plugin::new("DEL").stdin(b""), 6),
        (Plugin::new("ADD").conf(&conf("1.2.0")), 1),
        (Plugin::new("ADD").conf(&json!({"name": "n"})), 1),
        (Plugin::new("ADD").conf(&json!({"cniVersion": "1.0.0"})), 7),
        (Plugin::new("ADD").stdin(&vec![b' '; 3 << 20]), 7),
        (Plugin::new("ADD").env("CNI_NETNS", "/proc/self/ns/net").conf(&good), 8),
        (Plugin::new("CHECK").conf(&conf("0.3.1")), 1),
        (Plugin::new("CHECK").conf(&good), 7),
        (Plugin::new("GC").env("CNI_PATH", "/x").conf(&good), 1),
        (Plugin::new("STATUS").env("CNI_PATH", "/x").conf(&good), 1),
        (Plugin::new("GC").conf(&conf("1.1.0")), 4),
        (Plugin::new("GC").env("CNI_PATH", "/x").conf(&unusable_list), 7),
        (Plugin::new("GC").env("CNI_PATH", "/x").conf(&conf("1.1.0")), 11),
        (Plugin::new("STATUS").env("CNI_PATH", "/x").conf(&conf("1.1.0")), 50),
    ];
    for (plugin, code) in cases {
        let what = format!("{plugin:?}");
        assert_eq!(error_code(&plugin.run().await), code, "{what}");
    }
}

#[tokio::test]
async fn all_missing_variables_are_named() {
    let output = Plugin::bare().env("CNI_COMMAND", "ADD").run().await;
    let msg = output.json()["msg"].as_str().unwrap().to_owned();
    for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"] {
        assert!(msg.contains(name), "{msg}");
    }
}

#[tokio::test]
async fn a_node_program_that_does_not_listen_means_try_again_later() {
    let directory = tempfile::tempdir().unwrap();
    let absent = directory.path().join("absent.sock");
    let refusing = directory.path().join("refusing.sock");
    drop(std::os::unix::net::UnixListener::bind(&refusing).unwrap());
    for socket in [absent, refusing] {
        let socket = socket.to_str().unwrap();
        for command in ["ADD", "CHECK"] {
            let conf = json!({"cniVersion": "0.4.0", "name": "n", "socket": socket, "prevResult": {}});
            let output = Plugin::new(command).conf(&conf).run().await;
            assert_eq!(error_code(&output), 11);
            let error = output.json();
            assert_eq!(error["cniVersion"], "0.4.0");
            assert!(error["msg"].as_str().unwrap().contains(socket), "{error}");
            assert!(error["details"].as_str().unwrap().contains("fairlead node"), "{error}");
        }
    }
}

#[tokio::test]
async fn a_peer_that_closes_or_sends_no_grpc_means_try_again_later() {
    for greeting in [b"".as_slice(), b"HTTP/1.1 400 Bad Request\r\n\r\n"] {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let peer = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            std::io::Write::write_all(&mut stream, greeting).unwrap();
        });
        let conf = json!({"cniVersion": "1.0.0", "name": "n", "socket": socket});
        let output = Plugin::new("ADD").conf(&conf).run().await;
        assert_eq!(error_code(&output), 11, "{output:?}");
        peer.join().unwrap();
    }
}

#[tokio::test]
async fn errors_of_the_node_program_reach_the_runtime() {
    type MakeStatus = fn() -> Status;
    let with = |code: i32| CniError { code, msg: "pod shop/web-0: not found".into(), details: "d".into() };
    let unknown_container = with(3);
    let later = with(11);
    let cases: [(MakeStatus, u64, &str); 4] = [
        (|| Status::internal("plain"), 999, "plain"),
        (|| Status::unimplemented("no such method"), 999, "no such method"),
        (|| Status::unavailable("shutting down"), 11, "shutting down"),
        (|| Status::with_details(Code::Internal, "torn", vec![0xff; 9].into()), 999, "torn"),
    ];
    for (status, code, msg) in cases {
        let node = FakeNode::start(move |_| Err(status()));
        let output = Plugin::new("ADD").conf(&node.conf("1.0.0")).run().await;
        assert_eq!(error_code(&output), code);
        assert!(output.json()["msg"].as_str().unwrap().contains(msg), "{output:?}");
    }
    for error in [unknown_container, later] {
        let code = u64::try_from(error.code).unwrap();
        let node = FakeNode::start(move |_| Err(cni::status_with_error(Code::NotFound, error.clone())));
        let output = Plugin::new("ADD").conf(&node.conf("1.0.0")).run().await;
        assert_eq!(error_code(&output), code);
        assert_eq!(output.json()["msg"], "pod shop/web-0: not found");
        assert_eq!(output.json()["details"], "d");
    }
}

#[tokio::test]
async fn an_answer_that_is_not_a_result_is_an_error() {
    for answer in ["not json", "[1]", r#"{"ips": [{"address": "nowhere"}]}"#] {
        let node = FakeNode::start(move |_| Ok(answer.into()));
        let output = Plugin::new("ADD").conf(&node.conf("1.0.0")).run().await;
        assert_eq!(error_code(&output), 6, "{answer}");
    }
}

#[tokio::test]
async fn del_without_a_node_program_is_left_pending_and_succeeds() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("away.sock");
    let conf = json!({"cniVersion": "1.1.0", "name": "n", "socket": socket});
    for _ in 0..2 {
        let output = Plugin::new("DEL").conf(&conf).run().await;
        assert!(output.success, "{output:?}");
        assert_eq!(output.stdout, "");
        assert!(output.stderr.contains("left for the node program"), "{}", output.stderr);
    }
    let written = std::fs::read_dir(spool::pending_deletions(&socket)).unwrap();
    let names: Vec<_> = written.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["c0ffee:eth0"]);
}

#[tokio::test]
async fn del_fails_when_it_can_neither_be_done_nor_left_pending() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("away.sock");
    std::fs::write(directory.path().join("away.sock.d"), "in the way").unwrap();
    let conf = json!({"cniVersion": "1.0.0", "name": "n", "socket": socket});
    let output = Plugin::new("DEL").conf(&conf).run().await;
    assert_eq!(error_code(&output), 11, "{output:?}");
}

#[tokio::test]
async fn a_del_that_the_node_program_refuses_is_not_left_pending() {
    let node = FakeNode::start(|_| Err(Status::internal("netlink")));
    let conf = node.conf("1.0.0");
    let output = Plugin::new("DEL").conf(&conf).run().await;
    assert_eq!(error_code(&output), 999);
    let socket = std::path::PathBuf::from(conf["socket"].as_str().unwrap());
    assert!(!spool::pending_deletions(&socket).exists());
}

/// containerd takes an error of DEL with these words for a success, and code 3 says that there is nothing to remove.
#[tokio::test]
async fn no_error_of_del_can_be_taken_for_a_success() {
    type MakeStatus = fn() -> Status;
    let statuses: [MakeStatus; 3] = [
        || Status::not_found("pod shop/web-0 not found"),
        || Status::internal("netns: No such file or directory (os error 2)"),
        || {
            let (msg, details) = ("network \"Not found\"".to_owned(), "no such file or directory".to_owned());
            cni::status_with_error(Code::NotFound, CniError { code: 3, msg, details })
        },
    ];
    for status in statuses {
        let node = FakeNode::start(move |_| Err(status()));
        let output = Plugin::new("DEL").conf(&node.conf("1.0.0")).run().await;
        assert_ne!(error_code(&output), 3, "{output:?}");
        let said = format!("{}{}", output.stdout, output.stderr).to_lowercase();
        assert!(!said.contains("not found") && !said.contains("no such file or directory"), "{said}");
        assert!(said.contains("missing"), "{said}");
    }
    // What is wrong with the call itself, too.
    let conf = json!({"cniVersion": "1.0.0", "name": "no such file or directory"});
    for plugin in
        [Plugin::new("DEL").conf(&conf), Plugin::new("DEL").env("CNI_IFNAME", "not found").conf(&conf)]
    {
        let output = plugin.run().await;
        assert!(!output.success, "{output:?}");
        let said = output.stdout.to_lowercase();
        assert!(!said.contains("not found") && !said.contains("no such file or directory"), "{said}");
    }
}

#[tokio::test]
async fn check_passes_on_the_previous_result_and_the_differences() {
    let node = FakeNode::start(|args| match args.ifname.as_str() {
        "eth0" => Ok(Vec::new()),
        _ => {
            let error = CniError { code: 101, msg: "route gone".into(), details: "d".into() };
            Err(cni::status_with_error(Code::FailedPrecondition, error))
        }
    });
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let mut conf = node.conf(version);
        conf["prevResult"] = serde_json::from_str(RESULT).unwrap();
        let output = Plugin::new("CHECK").conf(&conf).run().await;
        assert!(output.success && output.stdout.is_empty(), "{output:?}");
        let output = Plugin::new("CHECK").env("CNI_IFNAME", "net1").conf(&conf).run().await;
        let expected = json!({"cniVersion": version, "code": 101, "msg": "route gone", "details": "d"});
        assert_eq!(output.json(), expected);
    }
    let calls = node.calls();
    assert!(calls.iter().all(|call| call.method == "Check"));
    let stdin: Value = serde_json::from_slice(&calls[0].args.stdin_data).unwrap();
    assert_eq!(stdin["prevResult"]["ips"][0]["address"], "10.100.0.5/32");
}

fn gc(conf: &Value) -> Plugin {
    Plugin::bare().env("CNI_COMMAND", "GC").env("CNI_PATH", "/opt/cni/bin").conf(conf)
}

#[tokio::test]
async fn gc_names_the_network_and_what_is_valid() {
    let (seen, asked) = std::sync::mpsc::channel();
    let collect = move |request: &GcRequest| {
        seen.send(request.clone()).unwrap();
        let freed = vec![Attachment { container_id: "gone".into(), ifname: "eth0".into() }];
        Ok(GcResponse { freed, failures: Vec::new() })
    };
    let node = FakeNode::of_network(collect, || Ok(()));
    let mut conf = node.conf("1.1.0");
    conf["cni.dev/valid-attachments"] = json!([{"containerID": "a", "ifname": "eth0"}]);
    let output = gc(&conf).run().await;
    assert!(output.success && output.stdout.is_empty(), "{output:?}");
    assert!(output.stderr.contains("gone"), "{}", output.stderr);
    let request = asked.recv().unwrap();
    assert_eq!(request.network, "k8s-pod-network");
    assert_eq!(request.valid, [Attachment { container_id: "a".into(), ifname: "eth0".into() }]);
}

#[tokio::test]
async fn gc_reports_what_could_not_be_freed() {
    let collect = |_: &GcRequest| {
        Ok(GcResponse { freed: Vec::new(), failures: vec!["a: busy".into(), "b: busy".into()] })
    };
    let node = FakeNode::of_network(collect, || Ok(()));
    let output = gc(&node.conf("1.1.0")).run().await;
    assert_eq!(error_code(&output), 5);
    assert_eq!(output.json()["details"], "a: busy; b: busy");
}

#[tokio::test]
async fn the_longest_list_a_configuration_may_have_is_passed_on() {
    let (seen, asked) = std::sync::mpsc::channel();
    let collect = move |request: &GcRequest| {
        seen.send(request.valid.len()).unwrap();
        Ok(GcResponse::default())
    };
    let node = FakeNode::of_network(collect, || Ok(()));
    let mut conf = node.conf("1.1.0");
    let entries: Vec<Value> =
        (0..15_000).map(|n| json!({"containerID": format!("{n:064x}"), "ifname": "eth0"})).collect();
    conf["cni.dev/valid-attachments"] = json!(entries);
    let output = gc(&conf).run().await;
    assert!(output.success, "{output:?}");
    assert_eq!(asked.recv().unwrap(), 15_000);
}

/// A runtime that is told of a failure makes the Node NotReady, and the cluster evicts the pods that run there.
#[tokio::test]
async fn status_is_no_failure_while_a_pod_is_attached() {
    let status = |conf: &Value| Plugin::bare().env("CNI_COMMAND", "STATUS").env("CNI_PATH", "/x").conf(conf);
    let dry = || {
        let error = CniError { code: 50, msg: "pool dry".into(), details: String::new() };
        Err(cni::status_with_error(Code::Unavailable, error))
    };
    let node = FakeNode::of_network(|_| Ok(GcResponse::default()), dry);
    let away = tempfile::tempdir().unwrap();
    let absent = json!({"cniVersion": "1.1.0", "name": "n", "socket": away.path().join("away.sock")});
    for conf in [node.conf("1.1.0"), absent] {
        assert_eq!(error_code(&status(&conf).run().await), 50);
        let networks = spool::networks(std::path::Path::new(conf["socket"].as_str().unwrap()));
        std::fs::create_dir_all(networks.join("any")).unwrap();
        std::fs::write(networks.join("any/c0ffee:eth0"), "").unwrap();
        let output = status(&conf).run().await;
        assert!(output.success && output.stdout.is_empty(), "{output:?}");
        assert!(output.stderr.contains("pods are attached"), "{}", output.stderr);
        std::fs::remove_file(networks.join("any/c0ffee:eth0")).unwrap();
        assert_eq!(error_code(&status(&conf).run().await), 50);
    }
}

#[tokio::test]
async fn status_passes_the_reason_on() {
    let status = |conf: &Value| Plugin::bare().env("CNI_COMMAND", "STATUS").env("CNI_PATH", "/x").conf(conf);
    let ready = FakeNode::of_network(|_| Ok(GcResponse::default()), || Ok(()));
    let output = status(&ready.conf("1.1.0")).run().await;
    assert!(output.success && output.stdout.is_empty(), "{output:?}");
    for code in [ErrorCode::PluginNotAvailable, ErrorCode::LimitedConnectivity] {
        let refuse = move || {
            let error = CniError { code: code.into(), msg: "pool dry".into(), details: String::new() };
            Err(cni::status_with_error(Code::Unavailable, error))
        };
        let node = FakeNode::of_network(|_| Ok(GcResponse::default()), refuse);
        let output = status(&node.conf("1.1.0")).run().await;
        assert_eq!(error_code(&output), u64::try_from(i32::from(code)).unwrap());
        assert_eq!(output.json()["msg"], "pool dry");
    }
}
