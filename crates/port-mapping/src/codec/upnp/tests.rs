use proptest::prelude::*;

use super::*;

const DESCRIPTION: &str = r#"<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><device><serviceList>
<service><serviceType>urn:schemas-upnp-org:service:Layer3Forwarding:1</serviceType><controlURL>/l3f</controlURL></service>
</serviceList><deviceList><device><serviceList><service>
 <serviceType>urn:schemas-upnp-org:service:WANIPConnection:1</serviceType>
 <controlURL>ctl/IPConn</controlURL><eventSubURL/>
</service><service><controlURL>http://192.0.2.9/evil</controlURL>
 <serviceType>urn:schemas-upnp-org:service:WANIPConnection:2</serviceType></service>
<service><serviceType> urn:schemas-upnp-org:service:WANPPPConnection:1 </serviceType><controlURL>/ppp</controlURL></service>
</serviceList></device></deviceList></device></root>"#;

fn location(url: &str) -> Location {
    url.parse().unwrap()
}

fn found(response: &str) -> Option<Location> {
    parse_search_response(response.replace('\n', "\r\n").as_bytes())
}

proptest! {
    #[test]
    fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let at = location("http://192.0.2.1:5000/a/b.xml");
        let _ = (parse_search_response(&bytes), parse_answer(&bytes), best_service(&bytes, &at));
    }

    #[test]
    fn hostile_documents_never_panic(document in "(<(/|[?]|!)?[a-z:]{0,3}(service|serviceType|controlURL|errorCode)?/? ?>?|[a-z/:0-9 ]{0,9}){0,30}") {
        let at = location("http://192.0.2.1:5000/a/b.xml");
        let _ = (parse_answer(document.as_bytes()), best_service(document.as_bytes(), &at));
    }

    #[test]
    fn a_location_stands_in_one_line(url in "http://192.0.2.1(:[0-9]{1,5})?[ -~\r\n\u{e4}]{0,20}") {
        if let Ok(location) = url.parse::<Location>() {
            prop_assert!(location.path.starts_with('/') && !location.path.contains(char::is_whitespace));
        }
    }
}

#[test]
fn the_best_service_of_the_gateway_itself_is_chosen() {
    let at = location("http://192.0.2.1:5000/root/desc.xml");
    let service = best_service(DESCRIPTION.as_bytes(), &at).unwrap();
    let control = Location { address: at.address, path: "/root/ctl/IPConn".to_owned() };
    assert_eq!(service, Service { service_type: ServiceType::WanIp1, control });
    // The one at 192.0.2.9 is chosen only by a gateway of this address.
    let other = best_service(DESCRIPTION.as_bytes(), &location("http://192.0.2.9:5000/desc.xml")).unwrap();
    assert_eq!((other.service_type, other.control.address.port()), (ServiceType::WanIp2, 80));
    assert_eq!(best_service(b"<service><serviceType>urn", &at), None);
}

#[test]
fn a_location_is_read_from_answers_of_gateways_alone() {
    let good = "HTTP/1.1 200 OK\nCACHE-CONTROL: max-age=120\n\
                ST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\nLocation: HTTP://192.0.2.1:5000/rootDesc.xml\n\n";
    assert_eq!(found(good), Some(location("http://192.0.2.1:5000/rootDesc.xml")));
    assert_eq!(found(&good.replace("200 OK", "404 No")), None);
    assert_eq!(found(&good.replace("InternetGatewayDevice", "MediaRenderer")), None);
    assert_eq!(found(&good.replace("192.0.2.1", "router.example.com")), None);
    assert_eq!(found(&good.replace("HTTP://", "https://")), None);
    assert_eq!(found(&good.replace("/rootDesc", "/root Desc")), None);
    assert_eq!(found("HTTP/1.1 200 OK\n\n"), None);
}

#[test]
fn an_action_says_what_is_mapped_and_nothing_else() {
    let control = location("http://192.0.2.1:5000/ctl");
    let service = Service { service_type: ServiceType::WanIp2, control };
    let client = "192.0.2.7:51820".parse().unwrap();
    let mapping = PortMapping { external_port: 4000, client, description: "fairlead </a>", lease: 7200 };
    let request = action_request(&service, &Action::AddAnyPortMapping(mapping));
    let (head, body) = request.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("POST /ctl HTTP/1.1\r\nHost: 192.0.2.1:5000\r\n"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    let urn = "urn:schemas-upnp-org:service:WANIPConnection:2";
    assert!(head.ends_with(&format!("SOAPAction: \"{urn}#AddAnyPortMapping\"")), "{head}");
    let texts: Vec<_> = Elements::of(body).filter(|element| matches!(element, Element::Text(..))).collect();
    let expected = [
        ("NewRemoteHost", ""),
        ("NewExternalPort", "4000"),
        ("NewProtocol", "UDP"),
        ("NewInternalPort", "51820"),
        ("NewInternalClient", "192.0.2.7"),
        ("NewEnabled", "1"),
        ("NewPortMappingDescription", "fairlead a"),
        ("NewLeaseDuration", "7200"),
    ];
    assert_eq!(texts, expected.map(|(name, text)| Element::Text(name, text)));
}

#[test]
fn answers_and_errors_are_read() {
    let body = "<s:Body><u:XResponse><NewReservedPort>4001</NewReservedPort>\
                <NewExternalIPAddress>198.51.100.1</NewExternalIPAddress></u:XResponse>";
    let answer = parse_answer(body.as_bytes());
    assert_eq!(answer.reserved_port, Some(4001));
    assert_eq!(answer.external_address, Some("198.51.100.1".parse().unwrap()));
    let fault = "<UPnPError><e:errorCode a=\"b\"> 718 </e:errorCode><errorDescription>no";
    assert_eq!(parse_answer(fault.as_bytes()), Answer { error: Some(718), ..Answer::default() });
    assert_eq!(parse_answer(b"<errorCode>x</errorCode>").error, Some(u16::MAX));
    assert_eq!(parse_answer(b"<NewReservedPort>4001</other>"), Answer::default());
}
