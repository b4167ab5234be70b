// Load for derper, by Tailscale's own client package. It speaks with the benchmark as src/relay/flow.rs says.
package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"tailscale.com/derp"
	"tailscale.com/derp/derphttp"
	"tailscale.com/net/netmon"
	"tailscale.com/net/netns"
	"tailscale.com/types/key"
	"tailscale.com/types/logger"
)

const (
	// Clients that connect at once.
	connecting = 32
	// Time after which packets that have not come are lost.
	lossTimeout = 200 * time.Millisecond
	headerBytes = 20
)

// order is one measurement.
type order struct {
	size     int
	window   uint64
	interval time.Duration
	length   time.Duration
}

// pair is two clients, of which the first sends to the second.
type pair struct {
	sender, receiver *derphttp.Client
	destination      key.NodePublic

	run   atomic.Uint32
	acked atomic.Uint64
	moved chan struct{}

	mu        sync.Mutex
	next      uint64
	received  uint64
	lost      uint64
	last      time.Time
	latencies []time.Duration
}

var epoch = time.Now()

func main() {
	address := os.Args[1]
	count, err := strconv.Atoi(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	netns.SetEnabled(false)
	pairs := connectAll(address, count)
	fmt.Println("ready")
	input := bufio.NewScanner(os.Stdin)
	var number uint32
	for input.Scan() {
		var size, interval, length int
		var window uint64
		if _, err := fmt.Sscan(input.Text(), &size, &window, &interval, &length); err != nil {
			log.Fatal(err)
		}
		number++
		measure(pairs, number, order{
			size: size, window: window,
			interval: time.Duration(interval) * time.Microsecond,
			length:   time.Duration(length) * time.Millisecond,
		})
	}
}

func connectAll(address string, count int) []*pair {
	pairs := make([]*pair, count)
	slots := make(chan struct{}, connecting)
	var done sync.WaitGroup
	for number := range pairs {
		slots <- struct{}{}
		done.Add(1)
		go func() {
			defer done.Done()
			defer func() { <-slots }()
			receiverKey := key.NewNode()
			p := &pair{
				sender:      connect(address, key.NewNode()),
				receiver:    connect(address, receiverKey),
				destination: receiverKey.Public(),
				moved:       make(chan struct{}, 1),
			}
			go receive(p.sender, func([]byte) {})
			go receive(p.receiver, p.receive)
			pairs[number] = p
		}()
	}
	done.Wait()
	return pairs
}

func connect(address string, private key.NodePrivate) *derphttp.Client {
	client, err := derphttp.NewClient(private, "https://"+address+"/derp", logger.Discard, netmon.NewStatic())
	if err != nil {
		log.Fatal(err)
	}
	if err := client.Connect(context.Background()); err != nil {
		log.Fatal(err)
	}
	return client
}

// receive takes what comes to a client until the program ends.
func receive(client *derphttp.Client, packet func([]byte)) {
	for {
		message, err := client.Recv()
		if err != nil {
			log.Fatal(err)
		}
		switch message := message.(type) {
		case derp.ReceivedPacket:
			packet(message.Data)
		case derp.PingMessage:
			if err := client.SendPong(message); err != nil {
				log.Fatal(err)
			}
		}
	}
}

func measure(pairs []*pair, run uint32, o order) {
	start := time.Now()
	var done sync.WaitGroup
	for number, p := range pairs {
		p.begin(run, start)
		done.Add(1)
		go func() {
			defer done.Done()
			offset := o.interval * time.Duration(number) / time.Duration(len(pairs))
			p.send(run, o, start.Add(offset), start.Add(o.length))
		}()
	}
	done.Wait()
	var received, lost uint64
	var latencies []time.Duration
	last := start
	for _, p := range pairs {
		p.mu.Lock()
		received += p.received
		lost += p.lost
		latencies = append(latencies, p.latencies...)
		if p.last.After(last) {
			last = p.last
		}
		p.mu.Unlock()
	}
	slices.Sort(latencies)
	percentile := func(share int) int64 {
		if len(latencies) == 0 {
			return 0
		}
		return latencies[(len(latencies)-1)*share/100].Microseconds()
	}
	fmt.Println(received, lost, last.Sub(start).Nanoseconds(), percentile(50), percentile(99))
}

func (p *pair) begin(run uint32, start time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next, p.received, p.lost, p.last, p.latencies = 0, 0, 0, start, nil
	p.acked.Store(0)
	p.run.Store(run)
}

func (p *pair) send(run uint32, o order, start, end time.Time) {
	payload := make([]byte, max(o.size, headerBytes))
	binary.LittleEndian.PutUint32(payload, run)
	var sent uint64
	for ; time.Now().Before(end); sent++ {
		if o.interval > 0 {
			time.Sleep(time.Until(start.Add(o.interval * time.Duration(sent))))
		}
		if !p.wait(sent, o.window) {
			p.acked.Store(sent)
		}
		binary.LittleEndian.PutUint64(payload[4:], sent)
		binary.LittleEndian.PutUint64(payload[12:], uint64(time.Since(epoch)))
		if err := p.sender.Send(p.destination, payload); err != nil {
			log.Fatal(err)
		}
	}
	p.wait(sent, 1)
	p.mu.Lock()
	p.lost += sent - p.next
	p.mu.Unlock()
}

// wait returns when fewer than window packets are on their way, or false after a timeout.
func (p *pair) wait(sent, window uint64) bool {
	for sent-min(sent, p.acked.Load()) >= window {
		select {
		case <-p.moved:
		case <-time.After(lossTimeout):
			return false
		}
	}
	return true
}

func (p *pair) receive(payload []byte) {
	if len(payload) < headerBytes || binary.LittleEndian.Uint32(payload) != p.run.Load() {
		return
	}
	now := time.Now()
	sequence := binary.LittleEndian.Uint64(payload[4:])
	sent := time.Duration(binary.LittleEndian.Uint64(payload[12:]))
	p.mu.Lock()
	p.lost += sequence - min(sequence, p.next)
	p.next = sequence + 1
	p.received++
	p.last = now
	p.latencies = append(p.latencies, now.Sub(epoch)-sent)
	p.mu.Unlock()
	p.acked.Store(sequence + 1)
	select {
	case p.moved <- struct{}{}:
	default:
	}
}
