package main

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/signal"
	"syscall"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
)

const etcdStartTimeout = 60 * time.Second

// etcdConfig is that of the only member of a cluster, with its store in dataDir.
func etcdConfig(dataDir, logPath string, clients, peers url.URL) *embed.Config {
	config := embed.NewConfig()
	config.Name, config.Dir = "bed", dataDir
	config.LogLevel, config.LogOutputs = "warn", []string{logPath}
	// A test's cluster need not survive a power cut, and syncing makes every write wait for the disk.
	config.UnsafeNoFsync = true
	// Left at zero it would log every single request as slow.
	config.WarningUnaryRequestDuration = embed.DefaultWarningUnaryRequestDuration
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{clients}, []url.URL{clients}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{peers}, []url.URL{peers}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	return config
}

// startEtcd opens (or creates) the store and waits until it answers: a member of several waits for most of them.
func startEtcd(config *embed.Config) (*embed.Etcd, error) {
	store, err := embed.StartEtcd(config)
	if err != nil {
		return nil, fmt.Errorf("start etcd in %s: %w", config.Dir, err)
	}
	select {
	case <-store.Server.ReadyNotify():
		return store, nil
	case err = <-store.Err():
	case <-time.After(etcdStartTimeout):
		err = fmt.Errorf("not ready after %v", etcdStartTimeout)
	}
	store.Close()
	return nil, fmt.Errorf("etcd in %s: %w (log: %s)", config.Dir, err, config.LogOutputs[0])
}

// startLocalEtcd starts one on free ports of the loopback interface; it also returns the client URL.
func startLocalEtcd(dataDir, logPath string) (*embed.Etcd, string, error) {
	var urls [2]url.URL
	for i := range urls {
		port, err := freePort("127.0.0.1")
		if err != nil {
			return nil, "", err
		}
		urls[i] = url.URL{Scheme: "http", Host: net.JoinHostPort("127.0.0.1", fmt.Sprint(port))}
	}
	store, err := startEtcd(etcdConfig(dataDir, logPath, urls[0], urls[1]))
	return store, urls[0].String(), err
}

// etcdMain understands the few of etcd's own flags that a test bed needs.
func etcdMain(args []string) error {
	flags := flag.NewFlagSet("etcd", flag.ExitOnError)
	dataDir := flags.String("data-dir", "", "directory of the store")
	clientURL := flags.String("listen-client-urls", "", "one URL to listen on for clients")
	peerURL := flags.String("listen-peer-urls", "", "one URL to listen on for peers")
	flags.String("advertise-client-urls", "", "accepted; clients get the URL listened on")
	flags.Bool("unsafe-no-fsync", true, "accepted; this etcd never syncs")
	_ = flags.Parse(args) // ExitOnError
	clients, clientsErr := url.Parse(*clientURL)
	peers, peersErr := url.Parse(*peerURL)
	if err := errors.Join(clientsErr, peersErr); err != nil {
		return err
	}
	return runEtcd(etcdConfig(*dataDir, "stderr", *clients, *peers))
}

// runEtcd serves until a signal comes.
func runEtcd(config *embed.Config) error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	store, err := startEtcd(config)
	if err != nil {
		return err
	}
	defer store.Close()
	select {
	case <-stop:
		return nil
	case err := <-store.Err():
		return err
	}
}
