package main

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
)

const readyTimeout = 180 * time.Second

// options of a control plane, as given on the command line.
type options struct {
	dir            string
	addresses      []netip.Addr
	names          []string
	port           int
	services       []netip.Prefix
	controllers    bool
	scheduler      bool
	ephemeral      bool
	apiserverArgs  []string
	controllerArgs []string
}

func parseOptions(args []string) (options, error) {
	var o options
	flags := o.flags("up")
	_ = flags.Parse(args) // ExitOnError
	err := o.complete(flags)
	return o, err
}

// flags of all commands that use a state directory.
func (o *options) flags(command string) *flag.FlagSet {
	o.services = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}
	flags := flag.NewFlagSet(command, flag.ExitOnError)
	flags.StringVar(&o.dir, "dir", "", "state directory; created, or continued when it has been used before")
	flags.IntVar(&o.port, "port", 0, "TCP port of the API server (0: a free one, or the one used before)")
	flags.BoolVar(&o.controllers, "controllers", false, "run kube-controller-manager")
	flags.BoolVar(&o.scheduler, "scheduler", false, "run kube-scheduler")
	flags.BoolVar(&o.ephemeral, "ephemeral", false, "remove the state directory at a regular end (not after a failure: the logs are in it)")
	flags.Func("address", "address clients use (repeatable; default 127.0.0.1). The first goes into the kubeconfig; with more than one the server listens on all interfaces", func(s string) error {
		address, err := netip.ParseAddr(s)
		o.addresses = append(o.addresses, address)
		return err
	})
	appendTo := func(list *[]string) func(string) error {
		return func(s string) error { *list = append(*list, s); return nil }
	}
	flags.Func("san", "further DNS name in the server's certificate (repeatable)", appendTo(&o.names))
	flags.Func("apiserver-arg", "further argument for kube-apiserver (repeatable)", appendTo(&o.apiserverArgs))
	flags.Func("controller-arg", "further argument for kube-controller-manager (repeatable)", appendTo(&o.controllerArgs))
	return flags
}

// complete checks what was parsed, and fills in what follows from it.
func (o *options) complete(flags *flag.FlagSet) (err error) {
	if o.dir == "" || flags.NArg() > 0 {
		return fmt.Errorf("-dir is needed, and nothing but flags (got %q)", flags.Args())
	}
	if len(o.addresses) == 0 {
		o.addresses = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	}
	// The API server insists that its first service range has the family of the address it advertises.
	if o.addresses[0].Is6() {
		slices.Reverse(o.services)
	}
	o.dir, err = filepath.Abs(o.dir)
	return err
}

func (o options) listenAddress() string {
	if len(o.addresses) == 1 {
		return o.addresses[0].String()
	}
	return "::"
}

func (o options) serviceRanges() string {
	ranges := make([]string, len(o.services))
	for i, prefix := range o.services {
		ranges[i] = prefix.String()
	}
	return strings.Join(ranges, ",")
}

// bed is a running control plane.
type bed struct {
	options
	authority  *authority
	server     string
	etcd       *embed.Etcd
	etcdURL    string
	client     *http.Client
	apiserver  *process // nil while a test has stopped it
	background []*process
	// ending is closed when stdin has ended or a signal came: the user of the bed is gone.
	ending chan struct{}
}

// up runs a control plane until stdin ends or a signal comes. On stdout it says "READY <kubeconfig>" once;
// then it reads commands from stdin, one a line, and answers each with "OK" or "ERROR <why>":
// stop-apiserver (killed, as by a crash; etcd lives on) and start-apiserver (same port, same state).
func up(args []string) error {
	o, err := parseOptions(args)
	if err != nil {
		return err
	}
	commands, ending := watchOwner()
	b := &bed{options: o, ending: ending}
	err = b.run(commands)
	b.close()
	if err == nil && o.ephemeral {
		return os.RemoveAll(o.dir)
	}
	return err
}

func (b *bed) run(commands <-chan string) error {
	if err := b.start(); err != nil {
		return err
	}
	fmt.Println("READY", b.authority.path("admin.kubeconfig"))
	return b.serve(commands)
}

func (b *bed) start() (err error) {
	if err := os.MkdirAll(b.dir, 0o700); err != nil {
		return err
	}
	if err := b.choosePort(); err != nil {
		return err
	}
	b.server = "https://" + net.JoinHostPort(b.addresses[0].String(), fmt.Sprint(b.port))
	if err := b.issueCredentials(); err != nil {
		return err
	}
	if b.etcd, b.etcdURL, err = startLocalEtcd(filepath.Join(b.dir, "etcd"), filepath.Join(b.dir, "etcd.log")); err != nil {
		return err
	}
	if err := b.startAPIServer(); err != nil {
		return err
	}
	if b.controllers {
		err = errors.Join(err, b.startBackground("kube-controller-manager", b.controllerManagerArgs()))
	}
	if b.scheduler {
		err = errors.Join(err, b.startBackground("kube-scheduler", b.clientArgs("kube-scheduler")))
	}
	return err
}

// choosePort keeps the port over restarts on one directory: kubeconfigs made from the first stay valid.
func (b *bed) choosePort() error {
	file := filepath.Join(b.dir, "port")
	if b.port == 0 {
		if content, err := os.ReadFile(file); err == nil {
			if _, err := fmt.Sscan(string(content), &b.port); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		} else if b.port, err = freePort(b.listenAddress()); err != nil {
			return err
		}
	}
	return os.WriteFile(file, fmt.Append(nil, b.port), 0o600)
}

func (b *bed) issueCredentials() (err error) {
	if b.authority, err = openAuthority(b.dir); err != nil {
		return err
	}
	names := append([]string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}, b.names...)
	addresses := []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}
	for _, address := range b.addresses {
		addresses = append(addresses, address.AsSlice())
	}
	for _, services := range b.services {
		addresses = append(addresses, services.Addr().Next().AsSlice())
	}
	if err := errors.Join(openServiceAccountKeys(b.dir), b.authority.issueServer("apiserver", addresses, names)); err != nil {
		return err
	}
	for _, user := range []struct{ file, name, group string }{
		{"admin", "kubernetes-admin", "system:masters"},
		{"kube-controller-manager", "system:kube-controller-manager", ""},
		{"kube-scheduler", "system:kube-scheduler", ""},
	} {
		if err := b.authority.issueClient(user.file, user.name, user.group); err != nil {
			return err
		}
		if _, err := b.authority.writeKubeconfig(user.file, b.server); err != nil {
			return err
		}
	}
	return b.makeClient()
}

func (b *bed) makeClient() error {
	admin, err := tls.LoadX509KeyPair(b.authority.path("admin.crt"), b.authority.path("admin.key"))
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AddCert(b.authority.certificate)
	transport := &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{admin}},
		DisableKeepAlives: true, // a connection of a killed API server must not answer for the next one
	}
	b.client = &http.Client{Timeout: 5 * time.Second, Transport: transport}
	return nil
}

func (b *bed) apiserverArguments() []string {
	file := b.authority.path
	args := []string{
		"--etcd-servers=" + b.etcdURL,
		"--bind-address=" + b.listenAddress(), fmt.Sprintf("--secure-port=%d", b.port),
		"--advertise-address=" + b.addresses[0].String(),
		"--tls-cert-file=" + file("apiserver.crt"), "--tls-private-key-file=" + file("apiserver.key"),
		"--client-ca-file=" + file("ca.crt"),
		"--kubelet-client-certificate=" + file("admin.crt"), "--kubelet-client-key=" + file("admin.key"),
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + file("sa.pub"), "--service-account-signing-key-file=" + file("sa.key"),
		"--service-cluster-ip-range=" + b.serviceRanges(),
		"--authorization-mode=Node,RBAC", "--allow-privileged=true",
	}
	if b.addresses[0].IsLoopback() {
		// Loopback addresses are not valid Endpoints; without this it complains every ten seconds.
		args = append(args, "--endpoint-reconciler-type=none")
	}
	if !b.controllers {
		// No controller creates the `default` ServiceAccounts that this plugin requires of every pod.
		args = append(args, "--disable-admission-plugins=ServiceAccount")
	}
	if strings.HasPrefix(b.etcdURL, "https:") {
		args = append(args, "--etcd-cafile="+file("ca.crt"), "--etcd-certfile="+file("etcd.crt"), "--etcd-keyfile="+file("etcd.key"))
	}
	return append(args, b.apiserverArgs...)
}

func (b *bed) clientArgs(name string) []string {
	kubeconfig := b.authority.path(name + ".kubeconfig")
	return []string{
		"--kubeconfig=" + kubeconfig, "--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig,
		"--secure-port=0", "--leader-elect=false",
	}
}

func (b *bed) controllerManagerArgs() []string {
	file := b.authority.path
	args := append(b.clientArgs("kube-controller-manager"),
		"--use-service-account-credentials=true",
		"--service-account-private-key-file="+file("sa.key"), "--root-ca-file="+file("ca.crt"),
		"--cluster-signing-cert-file="+file("ca.crt"), "--cluster-signing-key-file="+file("ca.key"),
		"--service-cluster-ip-range="+b.serviceRanges())
	return append(args, b.controllerArgs...)
}

func (b *bed) startBackground(name string, args []string) error {
	child, err := startProcess(b.dir, name, args)
	if err == nil {
		b.background = append(b.background, child)
	}
	return err
}

func (b *bed) startAPIServer() error {
	if b.apiserver != nil {
		return errors.New("the API server is running already")
	}
	child, err := startProcess(b.dir, "kube-apiserver", b.apiserverArguments())
	if err != nil {
		return err
	}
	b.apiserver = child
	deadline := time.Now().Add(readyTimeout)
	for !b.ready() {
		select {
		case <-child.ended:
			b.apiserver = nil
			return child.failure()
		case <-b.ending:
			return errors.New("asked to end before kube-apiserver was ready")
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("kube-apiserver at %s not ready after %v; its log: %s", b.server, readyTimeout, child.logPath)
		}
	}
	return nil
}

func (b *bed) ready() bool {
	response, err := b.client.Get(b.server + "/readyz")
	if err != nil {
		return false
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, response.Body)
	return response.StatusCode == http.StatusOK
}

func (b *bed) stopAPIServer() error {
	if b.apiserver == nil {
		return errors.New("the API server is not running")
	}
	b.apiserver.kill()
	b.apiserver = nil
	return nil
}

// close stops etcd last: an API server without it ignores SIGTERM for minutes.
func (b *bed) close() {
	for _, child := range b.background {
		child.kill()
	}
	if b.apiserver != nil {
		b.apiserver.kill()
	}
	if b.etcd != nil {
		b.etcd.Close()
	}
}

// serve handles commands until it is asked to end, or until a program ends by itself.
func (b *bed) serve(commands <-chan string) error {
	failures := make(chan error, len(b.background))
	for _, child := range b.background {
		go func() { <-child.ended; failures <- child.failure() }()
	}
	for {
		var apiserverEnded chan struct{}
		if b.apiserver != nil {
			apiserverEnded = b.apiserver.ended
		}
		select {
		case command := <-commands:
			b.obey(command)
		case <-b.ending:
			return nil
		case <-apiserverEnded:
			return b.apiserver.failure()
		case err := <-failures:
			return err
		case err := <-b.etcd.Err():
			return fmt.Errorf("etcd: %w", err)
		}
	}
}

func (b *bed) obey(command string) {
	var err error
	switch command {
	case "stop-apiserver":
		err = b.stopAPIServer()
	case "start-apiserver":
		err = b.startAPIServer()
	default:
		err = fmt.Errorf("unknown command %q", command)
	}
	if err != nil {
		fmt.Println("ERROR", err)
		return
	}
	fmt.Println("OK")
}

// watchOwner delivers the lines of stdin, and closes the second channel at its end or at a signal.
func watchOwner() (<-chan string, chan struct{}) {
	commands, ending := make(chan string), make(chan struct{})
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	end := sync.OnceFunc(func() { close(ending) })
	go func() { <-signals; end() }()
	go func() {
		defer end()
		for scanner := bufio.NewScanner(os.Stdin); scanner.Scan(); {
			select {
			case commands <- strings.TrimSpace(scanner.Text()):
			case <-ending:
			}
		}
	}()
	return commands, ending
}
