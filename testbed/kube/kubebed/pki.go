package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

const certificateLifetime = 10 * 365 * 24 * time.Hour

// authority is the cluster's own certificate authority. One outlives the process: a second `up` on the
// same directory must accept the credentials that the first one gave out.
type authority struct {
	dir         string
	certificate *x509.Certificate
	key         crypto.Signer
}

func (a *authority) path(file string) string { return filepath.Join(a.dir, file) }

// openAuthority loads ca.crt and ca.key from dir, or creates them.
func openAuthority(dir string) (*authority, error) {
	a := &authority{dir: dir}
	if _, err := os.Stat(a.path("ca.key")); err == nil {
		return a, a.load()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := certificateTemplate("kubebed-ca", "")
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	a.key, a.certificate = key, template
	if err := a.write("ca", template, key); err != nil {
		return nil, err
	}
	return a, a.load()
}

func (a *authority) load() error {
	certificate, err := readPEM(a.path("ca.crt"))
	if err != nil {
		return err
	}
	if a.certificate, err = x509.ParseCertificate(certificate); err != nil {
		return fmt.Errorf("%s: %w", a.path("ca.crt"), err)
	}
	key, err := readPEM(a.path("ca.key"))
	if err != nil {
		return err
	}
	if a.key, err = x509.ParseECPrivateKey(key); err != nil {
		return fmt.Errorf("%s: %w", a.path("ca.key"), err)
	}
	return nil
}

// issueClient makes file.crt and file.key for a user of the API server.
func (a *authority) issueClient(file, user, group string) error {
	template := certificateTemplate(user, group)
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	return a.issue(file, template)
}

// issueServer makes file.crt and file.key for the API server under all its names.
func (a *authority) issueServer(file string, addresses []net.IP, names []string) error {
	template := certificateTemplate("kube-apiserver", "")
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	template.IPAddresses, template.DNSNames = addresses, names
	return a.issue(file, template)
}

// issuePeer makes file.crt and file.key for programs that are servers and clients of each other.
func (a *authority) issuePeer(file, user string, addresses []net.IP) error {
	template := certificateTemplate(user, "")
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	template.IPAddresses = addresses
	return a.issue(file, template)
}

func (a *authority) issue(file string, template *x509.Certificate) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	return a.write(file, template, key)
}

func (a *authority) write(file string, template *x509.Certificate, key *ecdsa.PrivateKey) error {
	certificate, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		return fmt.Errorf("certificate %s: %w", file, err)
	}
	encoded, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return errors.Join(writePEM(a.path(file+".crt"), "CERTIFICATE", certificate),
		writePEM(a.path(file+".key"), "EC PRIVATE KEY", encoded))
}

// openServiceAccountKeys creates sa.key and sa.pub in dir unless they are there: with new ones every
// token handed out before would stop working.
func openServiceAccountKeys(dir string) error {
	private, public := filepath.Join(dir, "sa.key"), filepath.Join(dir, "sa.pub")
	if _, err := os.Stat(public); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	encoded, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	return errors.Join(writePEM(private, "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key)),
		writePEM(public, "PUBLIC KEY", encoded))
}

// writeKubeconfig writes file.kubeconfig for the user whose certificate is file.crt. It is JSON, which
// every reader of YAML takes, so that tests can edit it without a YAML library.
func (a *authority) writeKubeconfig(file, server string) (string, error) {
	data := map[string][]byte{}
	for _, name := range []string{"ca.crt", file + ".crt", file + ".key"} {
		content, err := os.ReadFile(a.path(name))
		if err != nil {
			return "", err
		}
		data[name] = content
	}
	// encoding/json renders []byte as base64, which is what the *-data fields are.
	config := map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "bed",
		"clusters": []any{map[string]any{"name": "bed", "cluster": map[string]any{
			"server": server, "certificate-authority-data": data["ca.crt"]}}},
		"users": []any{map[string]any{"name": file, "user": map[string]any{
			"client-certificate-data": data[file+".crt"], "client-key-data": data[file+".key"]}}},
		"contexts": []any{map[string]any{"name": "bed", "context": map[string]any{
			"cluster": "bed", "user": file}}},
	}
	encoded, err := json.MarshalIndent(config, "", "  ")
	if err != nil {
		return "", err
	}
	path := a.path(file + ".kubeconfig")
	return path, os.WriteFile(path, encoded, 0o600)
}

func certificateTemplate(user, group string) *x509.Certificate {
	subject := pkix.Name{CommonName: user}
	if group != "" {
		subject.Organization = []string{group}
	}
	// The clock of a peer (a virtual machine, say) may be a little behind this one.
	start := time.Now().Add(-time.Hour)
	serial := new(big.Int).SetInt64(time.Now().UnixNano())
	return &x509.Certificate{SerialNumber: serial, Subject: subject, NotBefore: start, NotAfter: start.Add(certificateLifetime)}
}

func writePEM(path, kind string, content []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: content}), 0o600)
}

func readPEM(path string) ([]byte, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(content)
	if block == nil {
		return nil, fmt.Errorf("%s holds no PEM block; remove the state directory to start afresh", path)
	}
	return block.Bytes, nil
}
