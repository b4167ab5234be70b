//! Requests to the API server without a program for each: most of what a call of kubectl costs is its start.
//!
//! `kubectl proxy` sends them on as the administrator. It listens on a path of the file system, which other network namespaces reach as well.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::Options;
use crate::programs::Programs;
use crate::supervised::Supervised;

const NAME: &str = "kubectl-proxy";
/// Longest time until the proxy listens, and until an answer comes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Running proxy; it ends when it is dropped.
pub(crate) struct Proxy {
    _program: Supervised,
    socket: PathBuf,
}

/// Request to the API server.
pub(crate) struct Request<'a> {
    pub(crate) method: &'static str,
    /// Path and query.
    pub(crate) target: &'a str,
    pub(crate) content_type: &'static str,
    pub(crate) body: &'a str,
}

impl Proxy {
    /// Starts one where the control plane runs, with the administrator's kubeconfig in `directory`.
    pub(crate) fn start(programs: &Programs, options: &Options, directory: &Path) -> anyhow::Result<Self> {
        let socket = directory.join("proxy.sock");
        let mut command = programs.direct("kubectl");
        command.arg(format!("--kubeconfig={}", directory.join("admin.kubeconfig").display()));
        command.arg("proxy").arg(format!("--unix-socket={}", socket.display()));
        let mut program = Supervised::start(&command, options, directory, NAME)?;
        let deadline = Instant::now() + TIMEOUT;
        while UnixStream::connect(&socket).is_err() {
            program.check_alive(NAME)?;
            ensure!(Instant::now() < deadline, "{NAME} does not listen after {} s", TIMEOUT.as_secs());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Self { _program: program, socket })
    }

    /// The object, or the list of objects, in the answer to a request.
    pub(crate) fn send(&self, request: &Request<'_>) -> anyhow::Result<Value> {
        let answer = self.exchange(request).map_err(anyhow::Error::from);
        answer
            .and_then(|answer| read(&answer))
            .with_context(|| format!("{} {} failed", request.method, request.target))
    }

    fn exchange(&self, request: &Request<'_>) -> io::Result<Vec<u8>> {
        let Request { method, target, content_type, body } = request;
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        // An answer to HTTP/1.0 is in one piece and ends with the connection.
        let request = format!(
            "{method} {target} HTTP/1.0\r\nHost: localhost\r\nAccept: application/json\r\n\
             Content-Type: {content_type}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(answer)
    }
}

/// The object in an answer; if it is a refusal, the message of the API server, or of the proxy, as an error.
fn read(answer: &[u8]) -> anyhow::Result<Value> {
    let answer = std::str::from_utf8(answer).context("the answer is no text")?;
    let (head, body) = answer.split_once("\r\n\r\n").with_context(|| format!("no answer: {answer:?}"))?;
    let object = serde_json::from_str::<Value>(body);
    let status = head.split(' ').nth(1).unwrap_or_default();
    if !status.starts_with('2') {
        let object = object.unwrap_or_default();
        bail!("{status}: {}", object.get("message").and_then(Value::as_str).unwrap_or(body).trim());
    }
    Ok(without_managers(object.with_context(|| format!("the answer is no JSON: {body:?}"))?))
}

/// Without the names of those who wrote each field, as kubectl prints objects.
fn without_managers(mut object: Value) -> Value {
    let items = object.get_mut("items").and_then(Value::as_array_mut);
    items.into_iter().flatten().for_each(remove_managers);
    remove_managers(&mut object);
    object
}

fn remove_managers(object: &mut Value) {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_are_read_as_kubectl_prints_them() {
        let list = json!({
            "kind": "List", "metadata": { "resourceVersion": "7" },
            "items": [{ "metadata": { "name": "a", "managedFields": [{ "manager": "kubectl" }] } }],
        });
        let answer = format!("HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{list}\n");
        let expected = json!({
            "kind": "List", "metadata": { "resourceVersion": "7" }, "items": [{ "metadata": { "name": "a" } }],
        });
        assert_eq!(read(answer.as_bytes()).unwrap(), expected);
        let one = "HTTP/1.0 201 Created\r\n\r\n{\"metadata\": {\"name\": \"a\", \"managedFields\": []}}";
        assert_eq!(read(one.as_bytes()).unwrap(), json!({ "metadata": { "name": "a" } }));
    }

    #[test]
    fn refusals_are_told_in_the_words_of_who_refuses() {
        let refused =
            "HTTP/1.0 404 Not Found\r\n\r\n{\"kind\": \"Status\", \"message\": \"pods \\\"a\\\" not found\"}";
        assert_eq!(read(refused.as_bytes()).unwrap_err().to_string(), "404: pods \"a\" not found");
        let proxy = "HTTP/1.0 500 Internal Server Error\r\n\r\ndial tcp: connection refused\n";
        assert_eq!(read(proxy.as_bytes()).unwrap_err().to_string(), "500: dial tcp: connection refused");
    }

    #[test]
    fn answers_that_break_off_are_errors() {
        for answer in [&b""[..], b"HTTP/1.0 200 OK\r\n", b"HTTP/1.0 200 OK\r\n\r\n{\"kind\"", b"\xff"] {
            assert!(read(answer).is_err(), "{answer:?}");
        }
    }
}
