// A member of a cluster, by the published client of the Sidero discovery protocol.
//
// Arguments: server (host:port), cluster ID, secret in hexadecimal, affiliate ID, TTL, and a file with the certificate of the server,
// without which TLS is not used. Each line of standard input is the JSON
// of what it publishes, or `null` to delete that. Each line of standard output is the JSON of the members it has found, whenever
// that changes, and of the address that the server sees. It ends with its standard input.
package main

import (
	"bufio"
	"context"
	"crypto/aes"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"sort"
	"time"

	"github.com/siderolabs/discovery-api/api/v1alpha1/client/pb"
	"github.com/siderolabs/discovery-client/pkg/client"
	"go.uber.org/zap"
)

// Member is what is published, and what is found.
type Member struct {
	NodeID    string   `json:"node_id"`
	Hostname  string   `json:"hostname"`
	Nodename  string   `json:"nodename,omitempty"`
	Addresses []string `json:"addresses"`
	PublicKey string   `json:"public_key"`
	Address   string   `json:"address"`
	Routed    []string `json:"routed"`
	Excluded  []string `json:"excluded"`
	Endpoints []string `json:"endpoints"`
}

// Found is a line of output.
type Found struct {
	ClientIP string   `json:"client_ip"`
	Members  []Member `json:"members"`
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "judge:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	if len(arguments) != 5 && len(arguments) != 6 {
		return fmt.Errorf("want SERVER CLUSTER-ID SECRET AFFILIATE-ID TTL [CERTIFICATE], not %q", arguments)
	}
	trusted := x509.NewCertPool()
	if len(arguments) == 6 {
		certificate, err := os.ReadFile(arguments[5])
		if err != nil {
			return err
		}
		if !trusted.AppendCertsFromPEM(certificate) {
			return fmt.Errorf("%s has no certificate", arguments[5])
		}
	}
	key, err := hex.DecodeString(arguments[2])
	if err != nil {
		return err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return err
	}
	ttl, err := time.ParseDuration(arguments[4])
	if err != nil {
		return err
	}
	member, err := client.NewClient(client.Options{
		Cipher:        block,
		Endpoint:      arguments[0],
		ClusterID:     arguments[1],
		AffiliateID:   arguments[3],
		ClientVersion: "v1.12.0",
		TTL:           ttl,
		TLSConfig:     func() *tls.Config { return &tls.Config{RootCAs: trusted, MinVersion: tls.VersionTLS12} },
		Insecure:      len(arguments) == 5,
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer cancel()
		if err := publish(member); err != nil {
			fmt.Fprintln(os.Stderr, "judge:", err)
		}
	}()
	changed := make(chan struct{}, 1)
	go report(ctx, member, changed)
	logger, err := zap.NewDevelopment()
	if err != nil {
		return err
	}
	return member.Run(ctx, logger, changed)
}

// publish reads what to publish, until there is no more.
func publish(member *client.Client) error {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var local *Member
		if err := json.Unmarshal(lines.Bytes(), &local); err != nil {
			return err
		}
		if local == nil {
			member.DeleteLocalAffiliate()
			continue
		}
		affiliate, err := local.affiliate()
		if err != nil {
			return err
		}
		if err := member.SetLocalData(affiliate, nil); err != nil {
			return err
		}
	}
	return lines.Err()
}

// report writes what was found whenever it may have changed. The client does not say when it has learnt its address.
func report(ctx context.Context, member *client.Client, changed <-chan struct{}) {
	output := json.NewEncoder(os.Stdout)
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-time.After(500 * time.Millisecond):
		}
		found := Found{Members: []Member{}}
		if address, ok := netip.AddrFromSlice(member.GetPublicIP()); ok {
			found.ClientIP = address.String()
		}
		for _, affiliate := range member.GetAffiliates() {
			found.Members = append(found.Members, memberOf(affiliate))
		}
		sort.Slice(found.Members, func(i, j int) bool { return found.Members[i].NodeID < found.Members[j].NodeID })
		if output.Encode(found) != nil {
			return
		}
	}
}

func (m *Member) affiliate() (*client.Affiliate, error) {
	affiliate := &pb.Affiliate{
		NodeId: m.NodeID, Hostname: m.Hostname, Nodename: m.Nodename,
		Kubespan: &pb.KubeSpan{PublicKey: m.PublicKey},
	}
	published := &client.Affiliate{Affiliate: affiliate}
	for _, text := range m.Addresses {
		address, err := bytesOf(text)
		if err != nil {
			return nil, err
		}
		affiliate.Addresses = append(affiliate.Addresses, address)
	}
	var err error
	if affiliate.Kubespan.Address, err = bytesOf(m.Address); err != nil {
		return nil, err
	}
	if affiliate.Kubespan.AdditionalAddresses, err = prefixesOf(m.Routed); err != nil {
		return nil, err
	}
	if affiliate.Kubespan.ExcludeAdvertisedAddresses, err = prefixesOf(m.Excluded); err != nil {
		return nil, err
	}
	for _, text := range m.Endpoints {
		endpoint, err := netip.ParseAddrPort(text)
		if err != nil {
			return nil, err
		}
		published.Endpoints = append(published.Endpoints,
			&pb.Endpoint{Ip: endpoint.Addr().AsSlice(), Port: uint32(endpoint.Port())})
	}
	return published, nil
}

func memberOf(found *client.Affiliate) Member {
	affiliate := found.Affiliate
	member := Member{
		NodeID:    affiliate.NodeId,
		Hostname:  affiliate.Hostname,
		PublicKey: affiliate.GetKubespan().GetPublicKey(),
		Address:   textOf(affiliate.GetKubespan().GetAddress()),
		Routed:    texts(affiliate.GetKubespan().GetAdditionalAddresses()),
		Excluded:  texts(affiliate.GetKubespan().GetExcludeAdvertisedAddresses()),
		Addresses: []string{},
		Endpoints: []string{},
	}
	for _, address := range affiliate.Addresses {
		member.Addresses = append(member.Addresses, textOf(address))
	}
	for _, endpoint := range found.Endpoints {
		address, _ := netip.AddrFromSlice(endpoint.Ip)
		member.Endpoints = append(member.Endpoints, netip.AddrPortFrom(address, uint16(endpoint.Port)).String())
	}
	return member
}

func bytesOf(text string) ([]byte, error) {
	address, err := netip.ParseAddr(text)
	return address.AsSlice(), err
}

// textOf does not unmap: an IPv4 address in its IPv6 form is seen as such.
func textOf(address []byte) string {
	parsed, ok := netip.AddrFromSlice(address)
	if !ok {
		return fmt.Sprintf("%x", address)
	}
	return parsed.String()
}

func prefixesOf(list []string) ([]*pb.IPPrefix, error) {
	var prefixes []*pb.IPPrefix
	for _, text := range list {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, err
		}
		prefixes = append(prefixes, &pb.IPPrefix{Ip: prefix.Addr().AsSlice(), Bits: uint32(prefix.Bits())})
	}
	return prefixes, nil
}

func texts(prefixes []*pb.IPPrefix) []string {
	list := []string{}
	for _, prefix := range prefixes {
		list = append(list, fmt.Sprintf("%s/%d", textOf(prefix.Ip), prefix.Bits))
	}
	return list
}
