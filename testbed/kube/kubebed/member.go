package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"

	"go.etcd.io/etcd/server/v3/embed"
)

// Ports that etcd's documentation names (https://etcd.io/docs/v3.6/op-guide/configuration/).
const (
	etcdClientPort = 2379
	etcdPeerPort   = 2380
)

// machine has an etcd and an API server, of a control plane that several machines share.
type machine struct {
	name    string
	address netip.Addr
}

// memberOptions are those of one machine's programs. The first of the addresses is its own.
type memberOptions struct {
	options
	name     string
	data     string
	machines []machine
}

// member runs one program of a machine: its etcd, its API server, which asks that etcd, or a program that asks that API server. Each runs
// until a signal comes, and ends when it fails: the caller starts it again. All find their certificates and keys in -dir, which
// `member credentials` makes, once for all machines. Clients of etcd and its peers need a certificate of the same authority.
func member(args []string) error {
	if len(args) == 0 {
		return errors.New("nothing to run: credentials, etcd, or a program of Kubernetes")
	}
	program := args[0]
	m, err := parseMember(program, args[1:])
	if err != nil {
		return err
	}
	b := m.bed()
	switch program {
	case "credentials":
		return b.issueMemberCredentials()
	case "etcd":
		return runEtcd(m.etcdConfig())
	case "kube-apiserver":
		runDaemon(program, b.apiserverArguments())
	case "kube-controller-manager":
		runDaemon(program, b.controllerManagerArgs())
	case "kube-scheduler":
		runDaemon(program, b.clientArgs(program))
	}
	return fmt.Errorf("%q is no program of a control plane", program)
}

func parseMember(program string, args []string) (*memberOptions, error) {
	m := &memberOptions{}
	flags := m.options.flags("member " + program)
	flags.StringVar(&m.name, "name", "", "name of this machine")
	flags.StringVar(&m.data, "data", "", "directory of this machine's etcd")
	flags.Func("member", "NAME=ADDRESS of a machine with an etcd and an API server, this one included (repeatable)", m.addMachine)
	_ = flags.Parse(args) // ExitOnError
	own := slices.IndexFunc(m.machines, func(it machine) bool { return it.name == m.name })
	if own < 0 {
		return nil, fmt.Errorf("no -member says the address of the machine %q (-name)", m.name)
	}
	m.addresses = slices.Insert(m.addresses, 0, m.machines[own].address)
	return m, m.options.complete(flags)
}

func (m *memberOptions) addMachine(text string) error {
	name, address, _ := strings.Cut(text, "=")
	parsed, err := netip.ParseAddr(address)
	m.machines = append(m.machines, machine{name: name, address: parsed})
	return err
}

// bed is the part of the control plane on this machine, of which nothing runs yet.
func (m *memberOptions) bed() *bed {
	clients := etcdURL(m.addresses[0], etcdClientPort)
	return &bed{
		options:   m.options,
		authority: &authority{dir: m.dir},
		server:    "https://" + net.JoinHostPort(m.addresses[0].String(), fmt.Sprint(m.port)),
		etcdURL:   clients.String(),
	}
}

func (m *memberOptions) etcdConfig() *embed.Config {
	own, file := m.addresses[0], (&authority{dir: m.dir}).path
	config := etcdConfig(m.data, "stderr", etcdURL(own, etcdClientPort), etcdURL(own, etcdPeerPort))
	initial := make([]string, len(m.machines))
	for i, it := range m.machines {
		peers := etcdURL(it.address, etcdPeerPort)
		initial[i] = it.name + "=" + peers.String()
	}
	config.Name, config.InitialCluster = m.name, strings.Join(initial, ",")
	// All machines of a test share its processors: a heartbeat that is late by a second must not begin an election.
	config.TickMs, config.ElectionMs = 200, 2000
	config.PeerTLSInfo.CertFile, config.PeerTLSInfo.KeyFile = file("etcd.crt"), file("etcd.key")
	config.PeerTLSInfo.TrustedCAFile, config.PeerTLSInfo.ClientCertAuth = file("ca.crt"), true
	config.ClientTLSInfo = config.PeerTLSInfo
	return config
}

func etcdURL(address netip.Addr, port int) url.URL {
	return url.URL{Scheme: "https", Host: net.JoinHostPort(address.String(), fmt.Sprint(port))}
}

// issueMemberCredentials is issueCredentials, with a certificate that is each etcd's and that of each client of one.
func (b *bed) issueMemberCredentials() error {
	if err := os.MkdirAll(b.dir, 0o700); err != nil {
		return err
	}
	if err := b.issueCredentials(); err != nil {
		return err
	}
	var addresses []net.IP
	for _, address := range b.addresses {
		addresses = append(addresses, address.AsSlice())
	}
	return b.authority.issuePeer("etcd", "etcd", addresses)
}
