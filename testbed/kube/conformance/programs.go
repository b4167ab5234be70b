//go:build programs

// Package programs names what is built from this module (../src/conformance.rs), so that `go mod tidy` keeps what it needs.
package programs

import (
	_ "github.com/onsi/ginkgo/v2/ginkgo"
	_ "k8s.io/kubernetes/test/e2e"
	_ "k8s.io/kubernetes/test/images/agnhost"
)
