//! Refusal of HTTP proxies: where they are configured, the API server is reached without them or not at all.

use anyhow::{Context as _, bail};
use fairlead_relay::client::Proxy;
use kube::Config;

/// Stands for the proxy in question, whatever it is called.
const ANY_PROXY: &str = "http://proxy";

/// Configuration of a direct connection to the API server.
///
/// kube takes `HTTPS_PROXY` for the API server as well, but fails without its support for proxies, and would compare `NO_PROXY` with
/// the proxy's host.
///
/// # Errors
/// A proxy is configured, and `NO_PROXY` does not list the API server.
pub fn direct(mut config: Config, variable: impl Fn(&str) -> Option<String>) -> anyhow::Result<Config> {
    if config.proxy_url.is_none() {
        return Ok(config);
    }
    let host = config.cluster_url.host().context("the kubeconfig names no API server")?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let named = |name: &str| match name {
        "HTTPS_PROXY" => Some(ANY_PROXY.to_owned()),
        _ => variable(name),
    };
    if Proxy::from_environment(host, named)?.is_some() {
        // The URL of the proxy may have a password.
        bail!(
            "HTTPS_PROXY or the kubeconfig names an HTTP proxy for the API server {host}, to which Fairlead connects directly: add \
             {host} to NO_PROXY"
        );
    }
    config.proxy_url = None;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(server: &str, proxy: Option<&str>, no_proxy: &str) -> Result<Option<String>, String> {
        let mut config = Config::new(server.parse().unwrap());
        config.proxy_url = proxy.map(|url| url.parse().unwrap());
        let variable = |name: &str| (name == "NO_PROXY").then(|| no_proxy.to_owned());
        let direct = direct(config, variable).map_err(|error| error.to_string())?;
        Ok(direct.proxy_url.map(|url| url.to_string()))
    }

    #[test]
    fn a_proxy_is_left_out_for_an_api_server_that_no_proxy_lists_and_else_refused() {
        let proxy = Some("http://user:secret@proxy.example:3128");
        assert_eq!(checked("https://192.0.2.1:6443", None, ""), Ok(None));
        for (server, no_proxy) in [
            ("https://192.0.2.1:6443", "192.0.2.0/24"),
            ("https://[2001:db8::1]:6443", "localhost, 2001:db8::1"),
            ("https://api.example:6443", ".example"),
        ] {
            assert_eq!(checked(server, proxy, no_proxy), Ok(None), "{server}");
        }
        let refused = checked("https://api.example:6443", proxy, "proxy.example").unwrap_err();
        assert!(refused.ends_with("add api.example to NO_PROXY") && !refused.contains("secret"), "{refused}");
    }
}
