//go:build tools

// The relay is built from the same module as its client.

package main

import _ "tailscale.com/cmd/derper"
