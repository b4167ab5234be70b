//go:build programs

// Package programs names what is built from this module (../src/multus.rs), so that `go mod tidy` keeps what it needs.
package programs

import _ "gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus"
