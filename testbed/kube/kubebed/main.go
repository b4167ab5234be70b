// Command kubebed is a Kubernetes control plane for tests, built from Go modules alone.
//
//	kubebed up -dir DIR [flags]     etcd, an API server and, if asked, controllers and scheduler (up.go)
//	kubebed member PROGRAM [flags]  one program of a control plane that several machines share (member.go)
//	kubebed PROGRAM ARGS...         one of Kubernetes's programs, or etcd, with its own arguments
//
// It exists so that tests talk to the real API server instead of to an imitation. It is not for
// production: etcd does not sync to disk, and the state directory holds every private key.
package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// Children ask the kernel to be killed when the thread that started them ends (process.go), so the
// main goroutine, which starts them all, must never move to another thread.
func init() { runtime.LockOSThread() }

var daemons = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kube-proxy":              proxy.NewProxyCommand,
}

func main() {
	if len(os.Args) < 2 {
		usage()
	}
	collectLess()
	// kubectl finds its own name and arguments where it would as a separate binary.
	os.Args = os.Args[1:]
	switch name := os.Args[0]; name {
	case "up":
		exitOn(name, up(os.Args[1:]))
	case "etcd":
		exitOn(name, etcdMain(os.Args[1:]))
	case "member":
		exitOn(name, member(os.Args[1:]))
	case "kubectl":
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			kubectlutil.CheckErr(err)
		}
	default:
		if _, known := daemons[name]; !known {
			usage()
		}
		runDaemon(name, os.Args[1:])
	}
}

// runDaemon is one of Kubernetes's programs, to its end.
func runDaemon(name string, args []string) {
	// The program finds its own name and arguments where it would as a separate binary.
	os.Args = append([]string{name}, args...)
	os.Exit(cli.Run(daemons[name]()))
}

// collectLess lets the heap grow to five times what is in use before garbage is collected, where GOGC says nothing else: a bed lives for
// minutes, and processors are what its tests lack.
func collectLess() {
	const percent = 400
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(percent)
	}
}

func usage() {
	fmt.Fprintln(os.Stderr, "usage: kubebed up|member|etcd|kubectl|kube-apiserver|kube-controller-manager|kube-scheduler|kubelet|kube-proxy ARGS...")
	os.Exit(2)
}

func exitOn(name string, err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "kubebed %s: %v\n", name, err)
		os.Exit(1)
	}
}
