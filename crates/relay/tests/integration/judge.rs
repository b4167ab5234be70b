//! tungstenite, which shares no code with ours, as the judge of our WebSocket: as a client of the relay, and as a server that ours opens.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use fairlead_relay::websocket::{Decoder, Role, close_frame, encode, pong_frame, read_response, request};
use fairlead_wire::relay::{Frame, MAX_BODY, PATH, SUBPROTOCOL, parse};
use tokio::task::spawn_blocking;
use tungstenite::client::ClientRequestBuilder;
use tungstenite::handshake::server::{Callback, ErrorResponse, Request, Response};
use tungstenite::{Error, Message};

use crate::bed::Bed;

const MASK: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];
/// One of each encoding of a length.
const LENGTHS: [usize; 4] = [0, 125, 126, 70_000];

#[tokio::test]
async fn a_client_of_another_implementation_opens_the_relay() {
    let bed = Bed::start_plain().await;
    let address = bed.address;
    let judged = spawn_blocking(move || {
        let uri = format!("ws://localhost:{}{PATH}", address.port()).parse().unwrap();
        let request = ClientRequestBuilder::new(uri).with_sub_protocol(SUBPROTOCOL);
        let (mut socket, response) =
            tungstenite::client(request, TcpStream::connect(address).unwrap()).unwrap();
        assert_eq!(response.headers()["sec-websocket-protocol"], SUBPROTOCOL);
        let hello = socket.read().unwrap().into_data();
        let parsed = parse(&hello, MAX_BODY).unwrap().unwrap();
        assert!(matches!(parsed.frame, Frame::Hello(_)) && parsed.length == hello.len());
        socket.send(Message::text("relays speak in binary")).unwrap();
        while !matches!(socket.read(), Ok(Message::Close(_)) | Err(_)) {}
    });
    judged.await.unwrap();
}

/// Answers with the subprotocol that is asked for.
struct Accept;

impl Callback for Accept {
    fn on_request(self, request: &Request, mut response: Response) -> Result<Response, ErrorResponse> {
        assert_eq!(request.uri().path(), PATH);
        let protocol = request.headers()["sec-websocket-protocol"].clone();
        response.headers_mut().insert("sec-websocket-protocol", protocol);
        Ok(response)
    }
}

#[test]
fn a_server_of_another_implementation_understands_our_client() {
    let nonce = *b"the sample nonce";
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.write_all(&request("relay.example", nonce)).unwrap();
    let mut theirs = tungstenite::accept_hdr(theirs, Accept).unwrap();
    for length in LENGTHS {
        ours.write_all(&encode(&vec![7; length], Some(MASK))).unwrap();
        assert_eq!(theirs.read().unwrap(), Message::binary(vec![7; length]));
        theirs.send(Message::binary(vec![8; length])).unwrap();
    }
    theirs.send(Message::Ping("are you there".into())).unwrap();

    let (mut bytes, mut head) = (vec![0; 1 << 18], None);
    let mut length = 0;
    let (mut decoder, mut data, mut ping) = (Decoder::new(Role::Client), Vec::new(), None);
    while ping.is_none() {
        let start = head.map_or(0, |_| length);
        length += ours.read(&mut bytes[length..]).unwrap();
        if head.is_none() {
            head = read_response(&bytes[..length], nonce).unwrap();
        }
        if let Some(head) = head {
            ping = decoder.decode(&bytes[start.max(head)..length], &mut data).unwrap().ping;
        }
    }
    assert_eq!(data, vec![8; LENGTHS.iter().sum()]);
    ours.write_all(&pong_frame(&ping.unwrap(), Some(MASK))).unwrap();
    assert_eq!(theirs.read().unwrap(), Message::Pong("are you there".into()));

    ours.write_all(&close_frame(Some(MASK))).unwrap();
    assert_eq!(theirs.read().unwrap(), Message::Close(None));
    let mut rest = [0; 16];
    assert!(matches!(theirs.read(), Err(Error::ConnectionClosed)), "the server answers and is done");
    let length = ours.read(&mut rest).unwrap();
    assert!(decoder.decode(&rest[..length], &mut Vec::new()).unwrap().closed);
}
