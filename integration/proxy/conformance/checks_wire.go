package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// What gRPC libraries hide: the frames and fields themselves.
func wireChecks() []check {
	return []check{
		{name: "wire: the driver gets the caller's fields", own: true, run: fieldsToDriver},
		{name: "wire: the caller gets the driver's frames", own: true, run: framesToCaller},
		{name: "wire: RST_STREAM of each code", own: true, run: resetsToCaller},
		{name: "wire: the caller's RST_STREAM reaches the driver", own: true, run: resetToDriver},
		{name: "wire: a reply before the request has ended", own: true, run: earlyReply},
	}
}

// replaceDriver puts a raw server in the driver's place and waits until calls get there.
func (l *look) replaceDriver(answer func(rawCall), settings ...http2.Setting) *rawServer {
	l.server.server.Stop()
	server, err := serveRaw(l.driver, settings, answer)
	if err != nil {
		l.require(false, "%v", err)
		return nil
	}
	err = l.waitFor("a call gets to the raw server", 5*time.Second, func() bool {
		connection := l.connect()
		defer connection.Close()
		return connection.Invoke(l.ctx, "/raw/Hello", &bytesValue{}, &bytesValue{}) == nil
	})
	l.require(err == nil, "%v", err)
	return server
}

var request = []string{":method", "POST", ":scheme", "http", ":path", "/raw/Call", ":authority", "localhost", "content-type", "application/grpc", "te", "trailers"}

func fieldsToDriver(l *look) string {
	server := l.replaceDriver(func(call rawCall) {
		call.headers(call.stream, true, ":status", "200", "content-type", "application/grpc", "grpc-status", "0")
	})
	defer server.close()
	fields := append(slices.Clone(request), "user-agent", "grpc-c/1 (linux)", "grpc-accept-encoding", "identity, gzip", "grpc-timeout", "7S", "a", "1", "a", "2",
		"b-bin", "AP+A", "b-bin", "AA==", "c", "", "grpc-encoding", "gzip", "x-forwarded-for", "me", "grpc-previous-rpc-attempts", "1", "traceparent", "00-1-2-3")
	rawAnswer(l.socket, 5*time.Second, message([]byte("x")), fields...)
	for _, contentType := range []string{"application/grpc+proto", "application/grpc+json", "application/grpc;x=1"} {
		other := slices.Clone(request)
		other[9] = contentType
		rawAnswer(l.socket, 5*time.Second, message(nil), other...)
	}
	withoutAuthority := slices.Delete(slices.Clone(request), 6, 8)
	answer := rawAnswer(l.socket, 5*time.Second, message(nil), withoutAuthority...)
	l.require(strings.Contains(answer, "grpc-status=\"0\""), "without an authority: %s", answer)
	server.lock.Lock()
	defer server.lock.Unlock()
	l.require(len(server.calls) == 5, "the driver got %d calls of 5", len(server.calls))
	var texts []string
	for _, call := range server.calls {
		var kept []string
		for _, field := range call.fields {
			switch field.Name {
			case ":authority":
				l.require(field.Value == "localhost", "authority %q", field.Value)
			case "grpc-timeout": // the driver gets what remains
			default:
				kept = append(kept, fmt.Sprintf("%s=%q", field.Name, field.Value))
			}
		}
		slices.Sort(kept)
		texts = append(texts, strings.Join(kept, " "))
	}
	return strings.Join(texts, "\n")
}

func framesToCaller(l *look) string {
	kinds := map[string]func(rawCall){
		"trailers-only": func(c rawCall) {
			c.headers(c.stream, true, ":status", "200", "content-type", "application/grpc", "grpc-status", "9", "grpc-message", "50%25 %C3%BC%0A", "grpc-status-details-bin", "CAk", "x", "1", "x", "2")
		},
		"headers, trailers": func(c rawCall) {
			c.headers(c.stream, false, ":status", "200", "content-type", "application/grpc+proto", "grpc-encoding", "identity", "h", "1", "h", "2", "h-bin", "AA")
			c.headers(c.stream, true, "grpc-status", "3", "grpc-message", "a%zzb%", "t", "1", "t", "2", "t-bin", "AA==")
		},
		"headers, data, trailers": func(c rawCall) {
			c.headers(c.stream, false, ":status", "200", "content-type", "application/grpc")
			c.data(c.stream, false, message(pattern(10_000)))
			c.headers(c.stream, true, "grpc-status", "0")
		},
		"no grpc-status": func(c rawCall) {
			c.headers(c.stream, false, ":status", "200", "content-type", "application/grpc")
			c.headers(c.stream, true, "t", "1")
		},
		"ends with data": func(c rawCall) {
			c.headers(c.stream, false, ":status", "200", "content-type", "application/grpc")
			c.data(c.stream, true, message([]byte("x")))
		},
		"HTTP 503": func(c rawCall) {
			c.headers(c.stream, false, ":status", "503", "content-type", "text/plain")
			c.data(c.stream, true, []byte("away"))
		},
		"HTTP 404 alone": func(c rawCall) { c.headers(c.stream, true, ":status", "404") },
		"unknown grpc-status": func(c rawCall) {
			c.headers(c.stream, true, ":status", "200", "content-type", "application/grpc", "grpc-status", "77")
		},
		"1 message, 2 frames": func(c rawCall) {
			c.headers(c.stream, false, ":status", "200", "content-type", "application/grpc")
			framed := message(pattern(3_000))
			c.data(c.stream, false, framed[:3])
			time.Sleep(20 * time.Millisecond)
			c.data(c.stream, false, framed[3:])
			c.headers(c.stream, true, "grpc-status", "0")
		},
	}
	var kind string
	server := l.replaceDriver(func(call rawCall) { kinds[kind](call) })
	defer server.close()
	var texts []string
	for name := range kinds {
		texts = append(texts, name)
	}
	slices.Sort(texts)
	for index, name := range texts {
		kind = name
		texts[index] += ": " + rawAnswer(l.socket, 5*time.Second, message([]byte("x")), request...)
	}
	return "\n" + strings.Join(texts, "\n")
}

func resetsToCaller(l *look) string {
	var code http2.ErrCode
	var afterHeaders bool
	server := l.replaceDriver(func(call rawCall) {
		if afterHeaders {
			call.headers(call.stream, false, ":status", "200", "content-type", "application/grpc")
			call.data(call.stream, false, message([]byte("x")))
			time.Sleep(5 * time.Millisecond)
		}
		call.reset(call.stream, code)
	})
	defer server.close()
	connection := l.connect()
	var texts []string
	for _, after := range []bool{false, true} {
		for number := range http2.ErrCode(14) {
			afterHeaders, code = after, number
			server.lock.Lock()
			before := len(server.calls)
			server.lock.Unlock()
			err := connection.Invoke(l.ctx, "/raw/Call", wrapperspb.Bytes([]byte("x")), &bytesValue{})
			server.lock.Lock()
			attempts := len(server.calls) - before
			server.lock.Unlock()
			// grpc-go itself repeats what the server refused unseen; through the proxy it must be able to.
			texts = append(texts, fmt.Sprintf("%v after headers=%t: %v, %d attempts", number, after, status.Code(err), attempts))
		}
	}
	return "\n" + strings.Join(texts, "\n")
}

func resetToDriver(l *look) string {
	server := l.replaceDriver(func(rawCall) {})
	defer server.close()
	connection := l.connect()
	for range 3 {
		ctx, cancel := l.briefly(100 * time.Millisecond)
		_ = connection.Invoke(ctx, "/raw/Call", &bytesValue{}, &bytesValue{}) // ends by its deadline
		cancel()
	}
	err := l.waitFor("3 resets at the driver", 2*time.Second, func() bool {
		server.lock.Lock()
		defer server.lock.Unlock()
		return len(server.resets) == 3
	})
	server.lock.Lock()
	defer server.lock.Unlock()
	l.require(err == nil, "%v: %v", err, server.resets)
	return fmt.Sprint(server.resets)
}

// earlyReply ends the call while the caller is still sending: the answer must win over the broken request.
func earlyReply(l *look) string {
	server := l.replaceDriver(func(call rawCall) {
		call.headers(call.stream, true, ":status", "200", "content-type", "application/grpc", "grpc-status", "8", "grpc-message", "enough")
		call.reset(call.stream, http2.ErrCodeNo)
	})
	defer server.close()
	connection := l.connect()
	var texts []string
	for range 20 {
		stream, err := connection.NewStream(l.ctx, &grpc.StreamDesc{ClientStreams: true}, "/raw/Call")
		for range 50 {
			if err != nil {
				break
			}
			err = stream.SendMsg(wrapperspb.Bytes(pattern(1000)))
		}
		if stream != nil {
			err = stream.RecvMsg(&bytesValue{})
		}
		texts = append(texts, status.Convert(err).String())
	}
	return strings.Join(slices.Compact(texts), "\n")
}
