use super::node::WireGuard;
use super::*;

#[test]
fn the_definition_passes_the_checks_of_clap() {
    Arguments::command().debug_assert();
}

#[test]
fn boolean_flags_take_an_optional_value() {
    let parse = |more: &[&str]| {
        let required = ["fairlead", "node", "--node-name", "a"];
        let Command::Node(node) = Arguments::parse_from(required.iter().chain(more)).command else {
            panic!("unexpected command")
        };
        (node.router, node.clear_routes_on_shutdown)
    };
    assert_eq!(parse(&[]), (false, false));
    assert_eq!(parse(&["--router", "--clear-routes-on-shutdown=true"]), (true, true));
    assert_eq!(parse(&["--router=false", "--clear-routes-on-shutdown"]), (false, true));
}

#[test]
fn what_flags_of_kg_say_is_said_to_the_node_program_as_well() {
    let line = "fairlead node --node-name=n1 --log-level=debug --metrics-addr=:1107 --health-addr=:1108 \
                --enable-ipam=false --wireguard=embedded";
    let Arguments { log_level, command: Command::Node(node), .. } =
        Arguments::parse_from(line.split_whitespace())
    else {
        panic!("unexpected command")
    };
    assert!(node.node_name == "n1" && matches!(log_level, LogLevel::Debug));
    assert_eq!((node.metrics_addr.port(), node.health_addr.port()), (1107, 1108));
    assert!(!node.enable_ipam && matches!(node.wireguard, WireGuard::Embedded));
}

#[test]
fn webhook_flags_of_coil_are_accepted_and_named() {
    let all = [
        "--webhook-addr=:1",
        "--cert-dir=/c",
        "--enable-cert-rotation",
        "--enable-restart-on-cert-refresh=true",
    ];
    let Command::Controller(controller) =
        Arguments::parse_from(["fairlead", "controller"].iter().chain(&all)).command
    else {
        panic!("unexpected command")
    };
    let names = all.map(|flag| flag.split('=').next().unwrap_or(flag));
    assert_eq!(controller.without_effect(), names);
}

#[test]
fn manual_pages_are_written_for_every_command_that_users_see() {
    let directory = tempfile::tempdir().unwrap();
    manual(directory.path()).unwrap();
    let page = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
    assert!(page("fairlead.1").contains("Exit codes"), "{}", page("fairlead.1"));
    assert!(page("fairlead-status.1").contains("kubeconfig"));
    assert!(page("fairlead-connectivity-test.1").contains("external"));
    assert!(!directory.path().join("fairlead-connectivity-probe.1").exists());
}

#[test]
fn every_query_names_its_exit_codes() {
    let queries = "status,egress explain,egress status,ipam show,ipam check,ipam release,connectivity test";
    for words in queries.split(',') {
        let words = format!("fairlead {words} --help");
        let help = Arguments::try_parse_from(words.split_whitespace()).unwrap_err().to_string();
        assert!(help.contains("Exit codes: 0"), "{help}");
    }
}

#[test]
fn completion_scripts_contain_the_subcommands() {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Arguments::command(), "fairlead", &mut script);
        let script = String::from_utf8(script).unwrap();
        assert!(script.contains("controller") && script.contains("release"));
    }
}
