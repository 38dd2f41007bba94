package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func failureChecks() []check {
	return []check{
		{name: "the driver dies: before headers, after headers, within a message", own: true, run: diesMidCall},
		{name: "the driver away: UNAVAILABLE at once; back: works", own: true, run: awayAndBack},
		{name: "the driver restarts 30 times: the next call works", own: true, run: restarts},
		{name: "the driver's socket is dead, refuses, or is no socket", own: true, run: deadSocket},
		{name: "the driver accepts and says nothing", own: true, run: silentDriver},
		{name: "the driver's folder is made anew", own: true, run: newFolder},
		{name: "GOAWAY with calls in flight", own: true, run: graceful},
		{name: "GOAWAY after each call", own: true, run: goAwayEach},
		{name: "GOAWAY refuses the calls above its last stream", own: true, run: goAwayRefuses},
		{name: "SIGTERM: calls in flight finish, the registration socket goes first", own: true, needsUs: true, run: terminated},
	}
}

func diesMidCall(l *look) string {
	kinds := []func(rawCall){
		func(c rawCall) { c.Close() },
		func(c rawCall) {
			c.headers(c.stream, false, ":status", "200", "content-type", "application/grpc")
			time.Sleep(20 * time.Millisecond)
			c.Close()
		},
		func(c rawCall) {
			c.headers(c.stream, false, ":status", "200", "content-type", "application/grpc")
			c.data(c.stream, false, message(pattern(1000))[:500])
			time.Sleep(20 * time.Millisecond)
			c.Close()
		},
		func(c rawCall) {
			c.headers(c.stream, false, ":status", "200", "content-type", "application/grpc")
			c.data(c.stream, false, message(nil))
			time.Sleep(20 * time.Millisecond)
			c.Close()
		},
	}
	names := []string{"before headers", "after headers", "within a message", "after a message"}
	var kind int
	server := l.replaceDriver(func(call rawCall) { kinds[kind](call) })
	defer server.close()
	texts := make([]string, len(kinds))
	for kind = range kinds {
		connection := l.connect()
		began := time.Now()
		err := connection.Invoke(l.ctx, "/raw/Call", wrapperspb.Bytes([]byte("x")), &bytesValue{})
		l.require(time.Since(began) < time.Second, "%s: told only after %v", names[kind], time.Since(began))
		texts[kind] = fmt.Sprintf("%s: %v", names[kind], status.Code(err))
		connection.Close()
	}
	return fmt.Sprintf("%q", texts)
}

// swiftly requires that a call over a new connection ends at once, and gives its code.
func (l *look) swiftly(what string) codes.Code {
	began := time.Now()
	ctx, cancel := l.briefly(5 * time.Second)
	defer cancel()
	err := kubeletCall(ctx, l.socket, Script{})
	took := time.Since(began)
	l.require(took < 250*time.Millisecond, "%s: told only after %v: %v", what, took, err)
	return status.Code(err)
}

func (l *look) restart() {
	made, err := serveDriver(l.driver, l.service)
	l.require(err == nil, "%v", err)
	l.server = made
}

func awayAndBack(l *look) string {
	var seen []codes.Code
	for range 3 {
		seen = append(seen, l.swiftly("there"))
		l.server.server.Stop()
		l.require(os.Remove(l.driver) == nil, "the socket was there")
		for range 5 {
			seen = append(seen, l.swiftly("away"))
		}
		l.restart()
		seen = append(seen, l.swiftly("back"))
	}
	l.require(slices.Equal(seen[:7], []codes.Code{0, 14, 14, 14, 14, 14, 0}), "%v", seen)
	return fmt.Sprint(seen)
}

func restarts(l *look) string {
	var seen []codes.Code
	for range 30 {
		seen = append(seen, l.swiftly("before"))
		l.server.server.Stop()
		l.restart()
		seen = append(seen, l.swiftly("after"))
	}
	return fmt.Sprint(seen)
}

func deadSocket(l *look) string {
	l.swiftly("there")
	l.server.server.Stop() // its file stays
	texts := fmt.Sprint(l.swiftly("dead"))
	l.require(os.Remove(l.driver) == nil, "the socket was there")
	l.require(os.WriteFile(l.driver, nil, 0o600) == nil, "a file")
	texts += fmt.Sprint(l.swiftly("a file"))
	l.restart()
	return texts + fmt.Sprint(l.swiftly("back"))
}

func silentDriver(l *look) string {
	l.swiftly("there")
	l.server.server.Stop()
	listener, err := listen(l.driver)
	l.require(err == nil, "%v", err)
	defer listener.Close()
	go func() {
		for {
			socket, err := listener.Accept()
			if err != nil {
				return
			}
			defer socket.Close() // held open until then
		}
	}()
	ctx, cancel := l.briefly(time.Second)
	defer cancel()
	began := time.Now()
	first := status.Code(kubeletCall(ctx, l.socket, Script{}))
	l.require(time.Since(began) < 1500*time.Millisecond, "a deadline of 1 s ended after %v", time.Since(began))
	l.restart() // the silent connections stay open, as a hung process would keep them
	return fmt.Sprint(first, l.swiftly("back"))
}

func newFolder(l *look) string {
	// The proxy's own socket would go with the folder, so the driver's is reached by a link.
	first, second := filepath.Join(l.folder, "a"), filepath.Join(l.folder, "b")
	l.require(os.Mkdir(first, 0o700) == nil && os.Mkdir(second, 0o700) == nil, "folders")
	l.server.server.Stop()
	path := l.driver
	var seen []codes.Code
	for _, folder := range []string{first, second} {
		real := filepath.Join(folder, "csi.sock")
		made, err := serveDriver(real, l.service)
		l.require(err == nil, "%v", err)
		l.require(os.RemoveAll(path) == nil && os.Symlink(real, path) == nil, "link")
		l.server = made
		seen = append(seen, l.swiftly("behind a link"))
		made.server.Stop()
	}
	return fmt.Sprint(seen)
}

func graceful(l *look) string {
	connection := l.connect()
	done := make(chan string)
	go func() {
		done <- spread(20, 20, func(int) error { return call(l.ctx, connection, Script{Sleep: 700 * time.Millisecond}) })
	}()
	err := l.waitFor("20 calls run", 2*time.Second, func() bool { return l.running.Load() == 20 })
	l.require(err == nil, "%v", err)
	old := l.server.server
	go old.GracefulStop()
	time.Sleep(50 * time.Millisecond)
	l.restart()
	during := ""
	for range 10 {
		during += fmt.Sprint(l.swiftly("while the old one ends"))
	}
	defer old.Stop()
	return <-done + during
}

func goAwayEach(l *look) string {
	server := l.replaceDriver(func(call rawCall) {
		call.headers(call.stream, false, ":status", "200", "content-type", "application/grpc")
		call.data(call.stream, false, message(nil))
		call.goAway(call.stream, 0)
		call.headers(call.stream, true, "grpc-status", "0")
	})
	defer server.close()
	return spread(300, 1, func(int) error {
		connection, err := dial(l.socket)
		if err != nil {
			return err
		}
		defer connection.Close()
		return connection.Invoke(l.ctx, "/raw/Call", &bytesValue{}, &bytesValue{})
	})
}

// goAwayRefuses: a stream above the last one was never looked at, so that the caller may send it again, and grpc-go does.
func goAwayRefuses(l *look) string {
	first := true
	server := l.replaceDriver(func(call rawCall) {
		if first {
			first = false
			call.goAway(call.stream-1, 0)
			return
		}
		call.headers(call.stream, false, ":status", "200", "content-type", "application/grpc")
		call.data(call.stream, false, message(nil))
		call.headers(call.stream, true, "grpc-status", "0")
	})
	defer server.close()
	ctx, cancel := l.briefly(3 * time.Second)
	defer cancel()
	return status.Code(l.connect().Invoke(ctx, "/raw/Call", &bytesValue{}, &bytesValue{})).String()
}

func terminated(l *look) string {
	if !l.through {
		return fmt.Sprint(call(l.ctx, l.connect(), Script{Sleep: time.Second}))
	}
	registration := filepath.Join(l.folder, "reg", driverName+"-reg.sock")
	done := make(chan error, 1)
	connection := l.connect()
	go func() { done <- call(l.ctx, connection, Script{Sleep: time.Second}) }()
	err := l.waitFor("the call runs", 2*time.Second, func() bool { return l.running.Load() == 1 })
	l.require(err == nil, "%v", err)
	l.require(l.process.Process.Signal(syscall.SIGTERM) == nil, "SIGTERM")
	time.Sleep(200 * time.Millisecond)
	_, err = os.Lstat(registration)
	l.require(os.IsNotExist(err), "200 ms after SIGTERM the registration socket is there: %v", err)
	answer := <-done
	select {
	case err := <-l.ended:
		l.ended <- err
		l.require(err == nil, "it ended with %v", err)
	case <-time.After(3 * time.Second):
		l.require(false, "it still runs 3 s after its last call")
	}
	_, err = net.Dial("unix", l.proxy)
	l.require(err != nil, "its socket still answers")
	return fmt.Sprint(answer)
}
