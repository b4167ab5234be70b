package main

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// process is one of Kubernetes's programs, run as a child of this one with its output in a log file.
type process struct {
	name    string
	logPath string
	command *exec.Cmd
	// ended is closed once the program is gone and reaped; err is valid only after that.
	ended chan struct{}
	err   error
}

// startProcess runs this same binary as the named program. Its log is dir/name.log, appended to, so
// that what a killed API server said last is still there after the next one started.
func startProcess(dir, name string, args []string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	logPath := filepath.Join(dir, name+".log")
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	command := exec.Command(self, append([]string{name}, args...)...)
	command.Dir, command.Stdout, command.Stderr = dir, log, log
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	child := &process{name: name, logPath: logPath, command: command, ended: make(chan struct{})}
	go func() {
		child.err = command.Wait()
		close(child.ended)
	}()
	return child, nil
}

// kill ends the program at once: nothing it holds outlives the test, its store belongs to etcd.
func (p *process) kill() {
	_ = p.command.Process.Kill() // fails only when it has ended already
	<-p.ended
}

// failure describes an unexpected end.
func (p *process) failure() error {
	return fmt.Errorf("%s ended by itself (%v); its log: %s", p.name, p.err, p.logPath)
}

// freePort finds a port below the range the kernel hands to outgoing connections, because it must stay
// free until its user binds it, and again while a killed API server is down.
func freePort(address string) (int, error) {
	const lowest, count, attempts = 15000, 15000, 200
	for range attempts {
		port := lowest + rand.IntN(count)
		listener, err := net.Listen("tcp", net.JoinHostPort(address, fmt.Sprint(port)))
		if err == nil {
			return port, listener.Close()
		}
	}
	return 0, fmt.Errorf("no free TCP port on %s in %d tries (is the address configured?)", address, attempts)
}
