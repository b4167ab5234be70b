//! `spec.relay.provider: managed`: the controller's objects in a real API server, and a relay with them on the lab's Internet.
//!
//! There is no kubelet and no kube-proxy: the test runs the program with the arguments and the Secret that the pod would have, at an
//! address that `controlEndpoint` names, and makes the Pod object that a ReplicaSet would make.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, loses_nothing, node, peer, steady, udp};
use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fairlead_demo::node::executable;
use fairlead_demo::{World, probe, servers, topology};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use testbed_lab::{Host, Process, Progress};

const NAMESPACE: &str = "fairlead-relay";
const PORT: u16 = 443;
const IMAGE: &str = "example.com/fairlead:test";
/// Everything the controller makes.
const OBJECTS: [&str; 6] = [
    "deployment/fairlead-relay",
    "service/fairlead-relay",
    "service/fairlead-relay-replicas",
    "poddisruptionbudget/fairlead-relay",
    "secret/fairlead-relay-ca",
    "secret/fairlead-relay-tls",
];

fn object(world: &World, name: &str) -> Result<Value> {
    let (kind, name) = name.split_once('/').context("no kind")?;
    let api = match kind {
        "deployment" => "apis/apps/v1",
        "poddisruptionbudget" => "apis/policy/v1",
        _ => "api/v1",
    };
    world.plane.get(&format!("/{api}/namespaces/{NAMESPACE}/{kind}s/{name}"))
}

fn apply_mesh(world: &World, spec: &Value) {
    servers::apply_mesh(world, spec).unwrap();
}

fn managed(fields: &Value) -> Value {
    json!({ "relay": { "provider": "managed", "managed": fields } })
}

fn status(world: &World) -> Result<Value> {
    Ok(world.mesh()?["status"].clone())
}

fn relay_ready(status: &Value) -> Result<(&str, &str, &str)> {
    let conditions = status["conditions"].as_array().context("no conditions")?;
    let found = conditions.iter().find(|condition| condition["type"] == "RelayReady").context("none yet")?;
    let word = |name: &str| found[name].as_str().unwrap_or_default();
    Ok((word("status"), word("reason"), word("message")))
}

fn eventually<T>(attempt: impl FnMut() -> Result<T>) -> T {
    testbed_lab::eventually(TIMEOUT, attempt).unwrap()
}

/// Waits for all objects and returns their UIDs.
fn uids(world: &World) -> Vec<String> {
    eventually(|| {
        OBJECTS
            .iter()
            .map(|name| {
                let object = object(world, name)?;
                let owner = &object["metadata"]["ownerReferences"][0];
                ensure!(owner["kind"] == "WireKubeMesh" && owner["name"] == "default", "{owner}");
                Ok(object["metadata"]["uid"].as_str().unwrap_or_default().to_owned())
            })
            .collect()
    })
}

fn are_gone(world: &World) {
    eventually(|| {
        let left: Vec<_> = OBJECTS.iter().filter(|name| object(world, name).is_ok()).collect();
        ensure!(left.is_empty(), "{left:?} are left");
        Ok(())
    });
}

/// The file that the pod's volume has.
fn file(secret: &Value, key: &str) -> Vec<u8> {
    STANDARD.decode(secret["data"][key].as_str().unwrap()).unwrap()
}

/// The pod as its ReplicaSet would make it, ready at this address. Pod Security Admission of the namespace judges it.
fn make_pod(world: &World, address: &str) {
    let deployment = object(world, OBJECTS[0]).unwrap();
    let mut spec = deployment["spec"]["template"]["spec"].clone();
    spec["nodeName"] = json!("cloud-1");
    let labels = &deployment["spec"]["template"]["metadata"]["labels"];
    let metadata = json!({ "name": "relay-1", "namespace": NAMESPACE, "labels": labels });
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec });
    world.plane.kubectl_stdin(&["create", "-f", "-"], &pod.to_string()).unwrap();
    let ready = json!([{ "type": "Ready", "status": "True" }]);
    let status =
        json!({ "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }], "conditions": ready });
    let patch = json!({ "status": status }).to_string();
    let arguments =
        ["patch", "pod", "relay-1", "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", &patch];
    world.plane.kubectl(&arguments).unwrap();
}

/// The program of the pod.
struct Relay {
    host: Host,
    directory: PathBuf,
    process: Option<Process>,
}

impl Relay {
    fn new(world: &World) -> Self {
        let host = world.lab().public_site("internet").host("relay").unwrap();
        let directory = world.directory().join("relay");
        fs::create_dir(&directory).unwrap();
        let token = world.plane.token("fairlead-relay", NAMESPACE, None).unwrap();
        world.plane.kubeconfig_for_token(&token, &directory.join("kubeconfig"), None).unwrap();
        Self { host, directory, process: None }
    }

    /// Stands in for the kubelet when the Secret changes: writes its files again.
    fn mount(&self, world: &World) {
        let secret = object(world, "secret/fairlead-relay-tls").unwrap();
        for key in ["tls.key", "tls.crt", "ca.crt"] {
            fs::write(self.directory.join(key), file(&secret, key)).unwrap();
        }
    }

    fn run(&mut self, world: &World) {
        let deployment = object(world, OBJECTS[0]).unwrap();
        let container = &deployment["spec"]["template"]["spec"]["containers"][0];
        let mounted = container["volumeMounts"][0]["mountPath"].as_str().unwrap();
        let arguments = container["args"].as_array().unwrap().iter().map(|argument| {
            let argument = argument.as_str().unwrap().replace(mounted, self.directory.to_str().unwrap());
            argument.replace("[::]:3478", &format!("{}:{PORT}", self.host.address()))
        });
        let mut program = self.host.command(executable("fairlead").unwrap()).unwrap();
        program.args(arguments).args(["--metrics-addr=127.0.0.1:9388", "--health-addr=127.0.0.1:9389"]);
        program.env("KUBECONFIG", self.directory.join("kubeconfig"));
        let mut process = self.host.spawn(&mut program, self.directory.join("log")).unwrap();
        process.wait_for_output("serving", TIMEOUT).unwrap();
        self.process = Some(process);
    }
}

fn is_relayed(world: &World, from: &str, to: &str) -> Result<()> {
    let seen = peer(node(world, from), to).with_context(|| format!("{from} has no peer {to}"))?;
    let endpoint = seen["endpoint"].as_str().unwrap_or_default();
    ensure!(seen["state"] == "up" && endpoint.starts_with("tcp://"), "{from} to {to}: {seen}");
    Ok(())
}

#[test]
fn nodes_reach_each_other_by_a_managed_relay() {
    let mut world = World::start(&topology::relayed(), &Progress::default()).unwrap();
    let mut relay = Relay::new(&world);
    let endpoint = format!("{}:{PORT}", relay.host.address());
    world.apply_pool().unwrap();
    apply_mesh(&world, &managed(&json!({ "controlEndpoint": endpoint, "image": IMAGE })));
    uids(&world);
    world.start_pods().unwrap();
    relay.mount(&world);
    relay.run(&world);
    let deadline = Instant::now() + TIMEOUT;
    let (pairs, took) = probe::all_pairs(&world.pods, deadline, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
    println!("all pairs after {took:?}");
    for (from, to) in [("hotel-1", "club-1"), ("fort-1", "hotel-1"), ("fort-1", "cloud-1")] {
        eventually(|| is_relayed(&world, from, to));
    }

    make_pod(&world, "10.64.0.250");
    let ready = eventually(|| {
        let status = status(&world)?;
        let (ready, reason, message) = relay_ready(&status)?;
        ensure!((ready, reason) == ("True", "Serving"), "{message}");
        Ok(status)
    });
    assert_eq!((&ready["relayEndpoint"], &ready["relayPodIPs"]), (&json!(endpoint), &json!(["10.64.0.250"])));

    // Both certificates are lost: the relay presents the new one once kubelet has brought it, and nodes trust both meanwhile.
    let flows = [udp(&world, "hotel-1", "club-1"), udp(&world, "fort-1", "cloud-1")];
    steady(&flows);
    let mark = Instant::now();
    let before = object(&world, "secret/fairlead-relay-tls").unwrap();
    world.plane.kubectl(&["delete", "secret", "-n", NAMESPACE, "fairlead-relay-tls"]).unwrap();
    eventually(|| {
        let secret = object(&world, "secret/fairlead-relay-tls")?;
        ensure!(secret["data"]["tls.crt"] != before["data"]["tls.crt"], "not yet");
        Ok(())
    });
    relay.mount(&world);
    // The relay reads it every 10 s; links that are up stay.
    std::thread::sleep(Duration::from_secs(12));
    loses_nothing("the certificate is replaced", &flows, mark);
    // The list of members outlives the API server.
    let mark = Instant::now();
    world.plane.stop_apiserver().unwrap();
    std::thread::sleep(Duration::from_secs(5));
    loses_nothing("the API server is down", &flows, mark);
    world.plane.start_apiserver().unwrap();
    relay.process.as_mut().unwrap().wait_for_output("watching again", TIMEOUT).unwrap();
    a_removed_member_is_disconnected(&world, &relay);
}

/// A program that is stopped keeps its connection, but does not publish its peer again.
fn a_removed_member_is_disconnected(world: &World, relay: &Relay) {
    let links = |expected: u32| {
        let text = relay.host.shell("curl -sS http://127.0.0.1:9388/metrics")?;
        let expected = format!("fairlead_relay_links {expected}\n");
        ensure!(text.contains(&expected), "no {expected:?}");
        Ok(())
    };
    eventually(|| links(4));
    let program = Pid::from_raw(node(world, "fort-1").process().unwrap().try_into().unwrap());
    kill(program, Signal::SIGSTOP).unwrap();
    world.plane.kubectl(&["delete", "wkpeer", "fort-1"]).unwrap();
    let from = Instant::now();
    eventually(|| links(3));
    println!("disconnected after {:?}", from.elapsed());
    assert!(from.elapsed() < Duration::from_secs(5), "docs/relay.md says so");
    kill(program, Signal::SIGCONT).unwrap();
    eventually(|| links(4));
}

#[test]
fn the_objects_of_a_managed_relay_follow_the_mesh() {
    let world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    apply_mesh(&world, &managed(&json!({})));
    // Outside of a pod there is no image that the controller could take.
    let unknown = eventually(|| {
        let status = status(&world)?;
        let (ready, reason, message) = relay_ready(&status)?;
        ensure!((ready, reason) == ("False", "ImageUnknown"), "{reason}");
        Ok(message.to_owned())
    });
    println!("{unknown}");

    apply_mesh(&world, &managed(&json!({ "image": IMAGE, "port": 443 })));
    let first = uids(&world);
    eventually(|| {
        let status = status(&world)?;
        ensure!(relay_ready(&status)?.1 == "WaitingForLoadBalancer", "{status}");
        ensure!(status["relayEndpoint"].is_null() && status["relayCABundle"].is_string(), "{status}");
        Ok(())
    });
    let ingress = json!({ "status": { "loadBalancer": { "ingress": [{ "ip": "192.0.2.7" }] } } }).to_string();
    let arguments = [
        "patch",
        "service",
        "fairlead-relay",
        "-n",
        NAMESPACE,
        "--subresource=status",
        "--type=merge",
        "-p",
        &ingress,
    ];
    world.plane.kubectl(&arguments).unwrap();
    eventually(|| {
        let status = status(&world)?;
        ensure!(status["relayEndpoint"] == "192.0.2.7:443", "{status}");
        ensure!(relay_ready(&status)?.1 == "PodNotReady", "{status}");
        Ok(())
    });

    // What is deleted or changed is there again.
    for name in OBJECTS {
        world.plane.kubectl(&["delete", "-n", NAMESPACE, name]).unwrap();
    }
    eventually(|| {
        let again = uids(&world);
        ensure!(again.iter().zip(&first).all(|(now, before)| now != before), "{again:?}");
        Ok(())
    });
    let scale = ["scale", "deployment", "fairlead-relay", "-n", NAMESPACE, "--replicas=5"];
    world.plane.kubectl(&scale).unwrap();
    eventually(|| {
        ensure!(object(&world, OBJECTS[0])?["spec"]["replicas"] == 1, "scaled");
        Ok(())
    });

    // A certificate that is about to expire.
    let before = object(&world, "secret/fairlead-relay-tls").unwrap();
    let soon = json!({ "data": { "last-day": STANDARD.encode("2020-01-01") } }).to_string();
    world.plane.kubectl(&["patch", "secret", "fairlead-relay-tls", "-n", NAMESPACE, "-p", &soon]).unwrap();
    eventually(|| {
        let now = object(&world, "secret/fairlead-relay-tls")?;
        ensure!(now["data"]["tls.crt"] != before["data"]["tls.crt"], "not renewed");
        ensure!(now["data"]["ca.crt"] == before["data"]["ca.crt"], "another authority");
        Ok(())
    });

    // The endpoint of a node port is the node that runs the pod.
    let limits = json!({ "memoryLimit": "256Mi" });
    apply_mesh(&world, &managed(&json!({ "image": IMAGE, "serviceType": "NodePort", "resources": limits })));
    make_pod(&world, "10.64.0.250");
    let text = world.plane.kubectl(&["get", "node", "cloud-1", "-o", "json"]).unwrap();
    let text: Value = serde_json::from_str(&text).unwrap();
    let address = text["status"]["addresses"][0]["address"].as_str().unwrap().to_owned();
    eventually(|| {
        let service = object(&world, OBJECTS[1])?;
        let port = &service["spec"]["ports"][0]["nodePort"];
        let status = status(&world)?;
        ensure!(status["relayEndpoint"] == format!("{address}:{port}"), "{status} {service}");
        ensure!(relay_ready(&status)?.0 == "True", "{status}");
        let container = &object(&world, OBJECTS[0])?["spec"]["template"]["spec"]["containers"][0];
        ensure!(container["resources"]["limits"]["memory"] == "256Mi", "{container}");
        Ok(())
    });

    // Another provider, and back; then no mesh.
    let external = json!({ "relay": { "provider": "external", "external": { "endpoint": "192.0.2.1:1" } } });
    apply_mesh(&world, &external);
    are_gone(&world);
    eventually(|| {
        let status = status(&world)?;
        let none =
            ["relayEndpoint", "relayCABundle", "relayPodIPs"].iter().all(|field| status[field].is_null());
        ensure!(none && relay_ready(&status).is_err(), "{status}");
        Ok(())
    });
    apply_mesh(&world, &managed(&json!({ "image": IMAGE })));
    uids(&world);
    world.plane.kubectl(&["delete", "wkmesh", "default"]).unwrap();
    are_gone(&world);
}
