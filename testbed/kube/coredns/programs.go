//go:build programs

// Package programs names what is built from this module (../src/conformance.rs), so that `go mod tidy` keeps what it needs.
package programs

import _ "github.com/coredns/coredns"
