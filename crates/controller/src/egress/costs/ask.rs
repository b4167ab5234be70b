//! Asks a gateway what it has to do. It may be any program: its answer is short, comes soon, or does not count.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fairlead_wire::http::parse_response;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::order::Load;

/// Longest time for an answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Longest answer in bytes.
const MAX_ANSWER: u64 = 4 << 10;

/// What the gateway says; `None` if that cannot be known.
pub(super) async fn load(address: IpAddr, port: u16) -> Option<Load> {
    let address = SocketAddr::new(address, port);
    match timeout(TIMEOUT, ask(address)).await {
        Ok(Ok(answer)) => parse(&answer),
        Ok(Err(error)) => {
            tracing::debug!(%address, %error, "cannot ask a gateway what it has to do");
            None
        }
        Err(_) => {
            tracing::debug!(%address, "a gateway does not say what it has to do");
            None
        }
    }
}

async fn ask(address: SocketAddr) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!(
        "GET /load HTTP/1.1\r\nHost: {address}\r\nAccept: application/json\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer).await?;
    Ok(answer)
}

/// Reads a whole answer whose body ends with the connection.
fn parse(answer: &[u8]) -> Option<Load> {
    let response = parse_response(answer, true).ok().flatten().filter(|response| response.status == 200)?;
    serde_json::from_slice(&response.body).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn an_answer_is_read_or_does_not_count() {
        let body = r#"{"connections":7,"clients":2,"draining":true}"#;
        let answer =
            |status: &str| format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\n\r\n{body}");
        let expected = Load { connections: Some(7), draining: true };
        assert_eq!(parse(answer("200 OK").as_bytes()), Some(expected));
        assert_eq!(parse(answer("404 Not Found").as_bytes()), None);
        assert_eq!(parse(b"HTTP/1.1 200 OK\r\n\r\n{\"connections\":null}"), Some(Load::default()));
        for text in
            ["", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n{\"connections\":-1}", "\r\n\r\n{}"]
        {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
        }
    }

    #[tokio::test]
    async fn one_that_sends_without_end_or_nothing_does_not_count() {
        let serve = |answer: Vec<u8>| async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            let server = tokio::spawn(async move {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 512];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(&answer).await;
                // It stays open.
                std::future::pending::<()>().await;
            });
            let load = load([127, 0, 0, 1].into(), port).await;
            server.abort();
            load
        };
        assert_eq!(
            serve(b"HTTP/1.1 200 OK\r\n\r\n".iter().copied().chain([b' '; 1 << 16]).collect()).await,
            None
        );
        assert_eq!(serve(Vec::new()).await, None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_answer_or_not(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }
    }
}
