//! An API server on loopback that has a few objects and reviews tokens, for one gateway. Tokens are unsigned: the claims say what the
//! review answers.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use testbed_netns::Namespace;

/// Objects of the server, by the last part of the path.
pub(crate) type Objects = Arc<Mutex<Vec<(&'static str, Value)>>>;

/// A token of a node program that counts for an audience.
pub(crate) fn token(node: &str, audience: &str) -> String {
    let claims = json!({ "iat": 1000, "exp": 4000, "aud": audience, "node": node });
    format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims.to_string()))
}

/// Serves in a namespace until the test process ends; the port.
pub(crate) fn serve(namespace: &Namespace, objects: Objects) -> u16 {
    let listener = namespace.run(|| TcpListener::bind("127.0.0.1:0")).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let objects = Arc::clone(&objects);
            thread::spawn(move || while answer(&stream, &objects).is_some() {});
        }
    });
    port
}

/// Answers one request; nothing when the connection ends.
fn answer(mut stream: &TcpStream, objects: &Objects) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|length| *length > 0)?;
    let target = line.split(' ').nth(1)?.to_owned();
    let mut length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok().filter(|length| *length > 0)?;
        if header.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = header.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    if let Some((_, name)) = path.split_once("/leases/") {
        let (status, text) = lease(objects, name, line.starts_with("PATCH").then_some(&body[..]));
        return write!(
            stream,
            "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{text}",
            text.len()
        )
        .ok();
    }
    let resource = path.rsplit('/').next()?;
    let named = query.split('&').find_map(|word| word.strip_prefix("fieldSelector=metadata.name%3D"));
    let found = || {
        let objects = objects.lock().unwrap();
        let is_meant = |(of, object): &&(&str, Value)| {
            *of == resource && named.is_none_or(|name| object["metadata"]["name"] == name)
        };
        let of_kind = objects.iter().filter(is_meant).map(|(_, object)| object.clone());
        of_kind.collect::<Vec<Value>>()
    };
    if query.contains("watch=true") {
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
            .ok()?;
        // It ends with the first change, and the objects are listed anew.
        for _ in 0..100 {
            if !query.contains(&format!("resourceVersion={}", version(&found()))) {
                let gone = json!({ "type": "ERROR", "object": { "kind": "Status", "apiVersion": "v1", "metadata": {},
                    "status": "Failure", "reason": "Expired", "message": "too old", "code": 410 } });
                writeln!(stream, "{gone}").ok()?;
                break;
            }
            thread::sleep(Duration::from_millis(100));
        }
        stream.shutdown(std::net::Shutdown::Both).ok()?;
        return None;
    }
    let text = match resource {
        "tokenreviews" => review(&body).to_string(),
        _ => {
            let items = found();
            let metadata = json!({ "resourceVersion": version(&items) });
            json!({ "kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items }).to_string()
        }
    };
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{text}",
        text.len()
    )
    .ok()
}

/// Reads a Lease, or applies a merge patch to it, if it has the version that the patch demands.
fn lease(objects: &Objects, name: &str, patch: Option<&[u8]>) -> (&'static str, String) {
    let mut objects = objects.lock().unwrap();
    let found = objects.iter_mut().find(|(of, object)| *of == "leases" && object["metadata"]["name"] == name);
    let status = |code: u16| {
        json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
            "reason": "Conflict", "message": "no" })
        .to_string()
    };
    let Some((_, object)) = found else { return ("404 Not Found", status(404)) };
    let Some(patch) = patch else { return ("200 OK", object.to_string()) };
    let patch: Value = serde_json::from_slice(patch).unwrap();
    let base = &patch["metadata"]["resourceVersion"];
    if !base.is_null() && *base != object["metadata"]["resourceVersion"] {
        return ("409 Conflict", status(409));
    }
    for (part, within) in [("metadata", Some("annotations")), ("spec", None)] {
        let (from, into) = match within {
            Some(within) => (&patch[part][within], &mut object[part][within]),
            None => (&patch[part], &mut object[part]),
        };
        for (key, value) in from.as_object().into_iter().flatten() {
            into[key] = value.clone();
        }
    }
    if let Some(annotations) = object["metadata"]["annotations"].as_object_mut() {
        annotations.retain(|_, value| !value.is_null());
    }
    let version: u64 = object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
    object["metadata"]["resourceVersion"] = json!((version + 1).to_string());
    ("200 OK", object.to_string())
}

/// Another one for other objects.
fn version(objects: &[Value]) -> String {
    let mut hasher = DefaultHasher::new();
    json!(objects).to_string().hash(&mut hasher);
    hasher.finish().to_string()
}

fn review(body: &[u8]) -> Value {
    let mut review: Value = serde_json::from_slice(body).unwrap();
    let token = review["spec"]["token"].as_str().unwrap_or_default().to_owned();
    let payload = token.split('.').nth(1).and_then(|payload| URL_SAFE_NO_PAD.decode(payload).ok());
    let claims: Value = payload.and_then(|payload| serde_json::from_slice(&payload).ok()).unwrap_or_default();
    let is_valid = review["spec"]["audiences"][0] == claims["aud"];
    review["status"] = match is_valid {
        true => json!({ "authenticated": true, "audiences": [claims["aud"]], "user": {
            "username": "system:serviceaccount:kube-system:fairlead-node",
            "extra": { "authentication.kubernetes.io/node-name": [claims["node"]] },
        } }),
        false => json!({ "authenticated": false, "error": "token audiences do not match" }),
    };
    review
}
