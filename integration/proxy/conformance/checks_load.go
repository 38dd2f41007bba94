package main

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func loadChecks() []check {
	return []check{
		{name: "10 000 calls, a third of them cancelled", own: true, run: cancelled},
		{name: "deadline that passes, as the driver sees it", run: passedDeadline},
		{name: "caller's connection breaks: the driver sees the cancellation", own: true, run: brokenCaller},
		{name: "slow reader: 20 streams of 50 MB stall", own: true, run: slowCaller},
		{name: "slow driver: 20 streams of 50 MB stall", own: true, run: slowDriver},
		{name: "a stalled stream does not hold up another call", own: true, run: stalledNeighbour},
		{name: "3 000 short connections, 16 at a time", own: true, run: shortConnections},
		{name: "500 connections open at once, three times", own: true, run: manyConnections},
		{name: "the driver's limit of 1 stream: 50 calls at once", own: true, options: limit(1), run: limited},
		{name: "the driver's limit of 10 streams: 200 calls at once", own: true, options: limit(10), run: limited},
		{name: "the driver's limit of 1 stream: a long call does not hold up another connection", own: true, options: limit(1), run: limitedNeighbour},
		{name: "1 000 calls in flight on one connection", own: true, run: inFlight},
	}
}

func limit(streams uint32) []grpc.ServerOption {
	return []grpc.ServerOption{grpc.MaxConcurrentStreams(streams)}
}

// settled waits until the driver runs nothing more, and the proxy has let go of what it opened.
func (l *look) settled(descriptors int) {
	err := l.waitFor("the driver runs no call", 5*time.Second, func() bool { return l.running.Load() == 0 })
	l.require(err == nil, "%d calls still run in the driver: %v", l.running.Load(), err)
	if l.through {
		// One connection to the driver may stay; the others of a burst may wait for the next call to find that they are idle.
		l.require(kubeletCall(l.ctx, l.socket, Script{}) == nil, "a call after it failed")
		err := l.waitFor("descriptors are closed", 3*time.Second, func() bool { return l.descriptors() <= descriptors+2 })
		l.require(err == nil, "%d descriptors, before it were %d: %v", l.descriptors(), descriptors, err)
	}
}

// baseline makes one call, so that lazy things exist, and gives the proxy's descriptors and anonymous memory.
func (l *look) baseline() (descriptors, kib int) {
	connection, err := dial(l.socket)
	if err != nil {
		panic(err) // as in connect
	}
	l.answer(l.ctx, connection, unaryMethod, []byte("x"))
	connection.Close()
	time.Sleep(50 * time.Millisecond)
	if l.through {
		return l.descriptors(), l.memory("RssAnon")
	}
	return 0, 0
}

// grown requires that the proxy's memory has come to rest near what it was.
func (l *look) grown(before int) {
	if l.through {
		after := l.memory("RssAnon")
		l.require(after-before <= 4<<10, "the proxy's anonymous memory went from %d to %d KiB", before, after)
	}
}

// spread does `work` for each number below count, so many at a time, and counts the codes.
func spread(count, workers int, work func(int) error) string {
	var lock sync.Mutex
	tally := map[codes.Code]int{}
	var next atomic.Int64
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for {
				number := int(next.Add(1)) - 1
				if number >= count {
					return
				}
				code := status.Code(work(number))
				lock.Lock()
				tally[code]++
				lock.Unlock()
			}
		})
	}
	all.Wait()
	return fmt.Sprint(tally)
}

func call(ctx context.Context, connection *grpc.ClientConn, script Script) error {
	return connection.Invoke(withScript(ctx, script), unaryMethod, wrapperspb.Bytes([]byte("x")), &bytesValue{})
}

func cancelled(l *look) string {
	descriptors, kib := l.baseline()
	connections := make([]*grpc.ClientConn, 8)
	for index := range connections {
		connections[index] = l.connect()
	}
	begun, gone := l.started.Load(), l.service.cancelled.Load()
	tally := spread(10_000, 64, func(number int) error {
		connection := connections[number%len(connections)]
		if number%3 != 0 {
			return call(l.ctx, connection, Script{})
		}
		ctx, cancel := context.WithCancel(l.ctx)
		defer cancel()
		time.AfterFunc(time.Duration(2+number%7)*time.Millisecond, cancel)
		return call(ctx, connection, Script{Hang: true})
	})
	err := l.waitFor("the driver runs no call", 5*time.Second, func() bool { return l.running.Load() == 0 })
	// A call may be cancelled before the driver has it; what did start must have been told.
	hung, told := l.started.Load()-begun-6666, l.service.cancelled.Load()-gone
	l.require(err == nil && told == hung, "%d hanging calls reached the driver, %d were told of the cancellation: %v", hung, told, err)
	// How many get there before their 2 to 8 ms are over depends on the machine.
	l.require(hung > 300, "only %d of 3334 cancelled calls reached the driver", hung)
	l.settled(descriptors + len(connections))
	l.grown(kib)
	return tally
}

func passedDeadline(l *look) string {
	connection := l.connect()
	before := l.service.cancelled.Load()
	began := time.Now()
	tally := spread(20, 20, func(int) error {
		ctx, cancel := l.briefly(300 * time.Millisecond)
		defer cancel()
		return call(ctx, connection, Script{Hang: true})
	})
	l.require(time.Since(began) < time.Second, "deadlines of 300 ms ended after %v", time.Since(began))
	err := l.waitFor("the driver saw it", time.Second, func() bool { return l.service.cancelled.Load()-before >= 20 })
	l.require(err == nil, "%v", err)
	return tally
}

func brokenCaller(l *look) string {
	descriptors, _ := l.baseline()
	before := l.service.cancelled.Load()
	for range 20 {
		var socket net.Conn
		connection := l.connect(grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			made, err := net.Dial("unix", l.socket)
			socket = made
			return made, err
		}))
		started := l.started.Load()
		ended := make(chan error, 1)
		go func() { ended <- call(l.ctx, connection, Script{Hang: true}) }()
		err := l.waitFor("the call runs", 2*time.Second, func() bool { return l.started.Load() > started })
		l.require(err == nil, "%v", err)
		socket.Close()
		<-ended
		connection.Close()
	}
	err := l.waitFor("20 cancellations", 2*time.Second, func() bool { return l.service.cancelled.Load()-before == 20 })
	l.require(err == nil, "%v: %d", err, l.service.cancelled.Load()-before)
	l.settled(descriptors)
	return ""
}

const stalls, stallBytes, stallMessage = 20, 50_000_000, 50_000

// window keeps grpc-go's own buffers small, so that what piles up piles up in the proxy.
func window() []grpc.DialOption {
	return []grpc.DialOption{grpc.WithInitialWindowSize(65_535), grpc.WithInitialConnWindowSize(65_535 * 32)}
}

func slowCaller(l *look) string {
	_, kib := l.baseline()
	connection := l.connect(window()...)
	var streams []grpc.ClientStream
	for range stalls {
		stream := l.stream(withScript(l.ctx, Script{Count: stallBytes / stallMessage, Reply: stallMessage}), connection, "Down")
		_ = stream.SendMsg(&bytesValue{}) // its error comes with RecvMsg
		_ = stream.CloseSend()
		streams = append(streams, stream)
	}
	time.Sleep(1500 * time.Millisecond)
	sent := l.sent.Load() * stallMessage
	l.require(sent < 60_000_000, "nobody reads, yet the driver could send %d bytes", sent)
	if l.through {
		held := l.memory("RssAnon") - kib
		l.require(held < stalls*512, "%d stalled streams cost the proxy %d KiB", stalls, held)
	}
	return drain(streams[0])
}

func slowDriver(l *look) string {
	_, kib := l.baseline()
	connection := l.connect()
	var sent atomic.Int64
	done := make(chan string, stalls)
	for range stalls {
		stream := l.stream(withScript(l.ctx, Script{Sleep: 2 * time.Second}), connection, "Up")
		go func() {
			for range 40 {
				if stream.SendMsg(wrapperspb.Bytes(pattern(stallMessage))) != nil {
					break
				}
				sent.Add(stallMessage)
			}
			_ = stream.CloseSend()
			done <- drain(stream)
		}()
	}
	time.Sleep(1500 * time.Millisecond)
	if l.through {
		held := l.memory("RssAnon") - kib
		l.require(held < stalls*512, "%d stalled streams cost the proxy %d KiB", stalls, held)
	}
	first := <-done
	for range stalls - 1 {
		if other := <-done; other != first {
			return first + " but " + other
		}
	}
	return first
}

func stalledNeighbour(l *look) string {
	for range 10 {
		stream := l.stream(withScript(l.ctx, Script{Count: stallBytes / stallMessage, Reply: stallMessage}), l.connect(), "Down")
		_ = stream.SendMsg(&bytesValue{}) // as above
	}
	time.Sleep(300 * time.Millisecond)
	connection := l.connect()
	var texts string
	for range 5 {
		ctx, cancel := l.briefly(2 * time.Second)
		texts += status.Code(call(ctx, connection, Script{Reply: 500_000})).String() + " "
		cancel()
	}
	return texts
}

// kubeletCall opens a connection, calls once, and closes: the kubelet does it for each of its calls.
func kubeletCall(ctx context.Context, socket string, script Script) error {
	connection, err := dial(socket)
	if err != nil {
		return err
	}
	defer connection.Close()
	return call(ctx, connection, script)
}

func shortConnections(l *look) string {
	descriptors, _ := l.baseline()
	again := func() string {
		return spread(1_500, 16, func(int) error { return kubeletCall(l.ctx, l.socket, Script{}) })
	}
	tally := again()
	kib := 0
	if l.through {
		kib = l.memory("RssAnon")
	}
	tally += again()
	l.settled(descriptors)
	if l.through {
		l.require(l.memory("RssAnon")-kib <= 1<<10, "the second half grew the proxy from %d to %d KiB", kib, l.memory("RssAnon"))
	}
	return tally
}

// manyConnections twice: an allocator may keep what a burst took, but the next burst must do with it.
func manyConnections(l *look) string {
	descriptors, _ := l.baseline()
	var tally string
	var kib [3]int
	for round := range kib {
		connections := make([]*grpc.ClientConn, 500)
		for index := range connections {
			connections[index] = l.connect()
		}
		tally += spread(len(connections), 32, func(number int) error { return call(l.ctx, connections[number], Script{}) })
		tally += spread(len(connections), len(connections), func(number int) error {
			return call(l.ctx, connections[number], Script{Sleep: 300 * time.Millisecond})
		})
		if l.through {
			kib[round] = l.memory("RssAnon")
		}
		for _, connection := range connections {
			connection.Close()
		}
		l.settled(descriptors)
	}
	l.require(kib[0] <= 500*64, "500 connections cost the proxy %d KiB", kib[0])
	l.require(kib[2] <= kib[1]+2<<10, "500 connections cost the proxy %d KiB, later %d, later %d", kib[0], kib[1], kib[2])
	return tally
}

func limited(l *look) string {
	connection := l.connect()
	one := spread(200, 200, func(int) error { return call(l.ctx, connection, Script{Sleep: 5 * time.Millisecond}) })
	return one + spread(200, 50, func(int) error { return kubeletCall(l.ctx, l.socket, Script{Sleep: 5 * time.Millisecond}) })
}

// limitedNeighbour: a mount may hang for two minutes, and the kubelet calls each time over a connection of its own.
func limitedNeighbour(l *look) string {
	go func() { _ = kubeletCall(l.ctx, l.socket, Script{Hang: true}) }() // ends with the check
	err := l.waitFor("the long call runs", 2*time.Second, func() bool { return l.running.Load() == 1 })
	l.require(err == nil, "%v", err)
	ctx, cancel := l.briefly(2 * time.Second)
	defer cancel()
	return status.Code(kubeletCall(ctx, l.socket, Script{})).String()
}

func inFlight(l *look) string {
	connection := l.connect()
	began := time.Now()
	tally := spread(1_000, 1_000, func(int) error { return call(l.ctx, connection, Script{Sleep: 500 * time.Millisecond}) })
	// grpc-go as a server has no limit; a lower one of the proxy makes the calls wait for each other.
	l.require(time.Since(began) < 5*time.Second, "1 000 calls of 500 ms took %v", time.Since(began))
	return tally
}
