package main

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const unaryMethod = "/" + serviceName + "/Unary"

// odd is what a status message may hold: percent signs, a line end, letters beyond ASCII, a quote, a NUL, a tab.
const odd = "50% of %2F volumes\nüber 100 %\r\t\"x\" 体积\x00 end "

// answer makes one unary call and prints all that a caller can see of it.
func (l *look) answer(ctx context.Context, connection *grpc.ClientConn, method string, value []byte, options ...grpc.CallOption) string {
	var header, trailer metadata.MD
	reply := &bytesValue{}
	err := connection.Invoke(ctx, method, wrapperspb.Bytes(value), reply, append(options, grpc.Header(&header), grpc.Trailer(&trailer))...)
	return told(err, header, trailer) + fmt.Sprintf(" reply=%d/%08x", len(reply.Value), crc32.ChecksumIEEE(reply.Value))
}

func told(err error, header, trailer metadata.MD) string {
	answer := status.Convert(err)
	text := fmt.Sprintf("%v %q", answer.Code(), answer.Message())
	for _, detail := range answer.Proto().GetDetails() {
		text += fmt.Sprintf(" detail=%s/%x", detail.TypeUrl, detail.Value)
	}
	return text + " header=" + sorted(header) + " trailer=" + sorted(trailer)
}

// sorted prints metadata by name; the values of one name keep their order.
func sorted(md metadata.MD) string {
	var texts []string
	for name, values := range md {
		texts = append(texts, fmt.Sprintf("%s=%q", name, values))
	}
	slices.Sort(texts)
	return "[" + strings.Join(texts, " ") + "]"
}

// seenBy lets the server tell what it saw of a call.
func (l *look) seenBy(ctx context.Context, connection *grpc.ClientConn, value []byte, more ...string) (Seen, error) {
	reply := &bytesValue{}
	var seen Seen
	err := connection.Invoke(withScript(ctx, Script{Tell: true}, more...), unaryMethod, wrapperspb.Bytes(value), reply)
	if err == nil {
		err = json.Unmarshal(reply.Value, &seen)
	}
	return seen, err
}

func answerChecks() []check {
	all := []check{
		{name: "every status code: trailers only, and after headers", run: everyCode},
		{name: "metadata both ways: binary, repeated, of each kind", run: metadataBothWays},
		{name: "unknown service, unknown method, odd paths", run: unknownMethods},
		{name: "registration service on the CSI socket, 50 times", run: registrationOnDriver},
		{name: "Identity and Node of CSI", run: csiServices},
		{name: "empty message", run: func(l *look) string { return l.answer(l.ctx, l.connect(), unaryMethod, nil) }},
		{name: "gzip both ways", run: compressed},
		{name: "large metadata: 8, 16 and 64 KiB, both ways and in an error", run: largeMetadata},
		{name: "deadline as the driver sees it", run: deadlines},
		{name: "authority: localhost, encoded path, raw path", run: authorities},
	}
	for _, mib := range []int{5, 64} {
		name := fmt.Sprintf("%d MiB both ways", mib)
		all = append(all, check{name: name, run: func(l *look) string { return bigMessage(l, mib<<20) }})
	}
	return all
}

func everyCode(l *look) string {
	connection, texts := l.connect(), []string{}
	for code := range codes.Code(17) {
		for _, headerFirst := range []bool{false, true} {
			script := Script{Code: code, Message: []byte(odd), HeaderFirst: headerFirst, Header: [][2]string{{"h", "1"}},
				Trailer: [][2]string{{"t", "first"}, {"t", "second"}, {"t-bin", "\x00\xff\x80"}, {"u", "a, b"}}}
			if code != codes.OK {
				script.Details = []byte{0, 1, 255, byte(code)}
			}
			answer := l.answer(withScript(l.ctx, script), connection, unaryMethod, []byte("x"))
			l.require(strings.HasPrefix(answer, code.String()), "code %v gave %s", code, answer)
			texts = append(texts, answer)
		}
	}
	return strings.Join(texts, "\n")
}

func metadataBothWays(l *look) string {
	connection := l.connect()
	sent := []string{"a", "1", "a", "2", "a", "3, 4", "x-blank", "", "x-inner", "b  c", "x-bin", "\x00\x01\xfe\xff", "x-bin", "", "x-bin", odd,
		"authorization", "Bearer x", "cookie", "a=1; b=2", "x_y.z-0", "~", "user-agent-like", "u"}
	seen, err := l.seenBy(l.ctx, connection, []byte("x"), sent...)
	delete(seen.Metadata, ":authority") // has a check of its own
	script := Script{Header: [][2]string{{"a", "1"}, {"a", "2"}, {"h-bin", "\xff\x00"}, {"set-cookie", "x=1"}, {"server", "mine"}, {"date", "never"}, {"via", "v"}},
		Trailer: [][2]string{{"t", "x"}, {"t", "y"}, {"t-bin", odd}, {"t-bin", "\x00"}, {"date", "t"}}}
	back := l.answer(withScript(l.ctx, script), connection, unaryMethod, []byte("x"))
	return fmt.Sprintf("%v %s\n%s", err, sorted(seen.Metadata), back)
}

func unknownMethods(l *look) string {
	connection, texts := l.connect(), []string{}
	for _, method := range []string{"/no.such.Service/Method", "/" + serviceName + "/NoSuch", "/csi.v1.Controller/CreateVolume", "/csi.v1.Node/Future",
		"/a", "/", "/a/b/c", "/a%2Fb/c", "/csi.v1.Node/Node?x=1"} {
		texts = append(texts, method+": "+l.answer(l.ctx, connection, method, []byte("x")))
	}
	l.require(strings.Contains(texts[0], "Unimplemented"), "%s", texts[0])
	return strings.Join(texts, "\n")
}

func registrationOnDriver(l *look) string {
	var texts []string
	for range 50 {
		connection := l.connect()
		texts = append(texts, l.answer(l.ctx, connection, "/pluginregistration.Registration/GetInfo", nil))
		connection.Close()
	}
	texts = slices.Compact(texts)
	l.require(len(texts) == 1 && strings.HasPrefix(texts[0], "Unimplemented"), "%q", texts)
	return strings.Join(texts, "\n")
}

func csiServices(l *look) string {
	connection, texts := l.connect(), []string{}
	for _, method := range []string{"Identity/GetPluginInfo", "Identity/GetPluginCapabilities", "Identity/Probe", "Node/NodeGetInfo", "Node/NodeGetCapabilities",
		"Node/NodeStageVolume", "Node/NodeUnstageVolume", "Node/NodePublishVolume", "Node/NodeUnpublishVolume", "Node/NodeGetVolumeStats", "Node/NodeExpandVolume"} {
		texts = append(texts, l.answer(l.ctx, connection, "/csi.v1."+method, nil))
	}
	return strings.Join(texts, "\n")
}

func bigMessage(l *look, size int) string {
	if l.through {
		if err := l.forgetPeak(); err != nil {
			l.require(false, "peak: %v", err)
		}
	}
	before := 0
	if l.through {
		before = l.memory("VmRSS")
	}
	connection := l.connect()
	seen, err := l.seenBy(l.ctx, connection, pattern(size))
	seen.Metadata, seen.Remaining = nil, 0
	back := l.answer(withScript(l.ctx, Script{Reply: size}), connection, unaryMethod, []byte("x"))
	echoed := l.answer(l.ctx, connection, unaryMethod, pattern(size))
	if l.through {
		grown := l.memory("VmHWM") - before
		l.require(grown < maxGrowthKiB, "the proxy grew by %d KiB while %d MiB passed", grown, size>>20)
	}
	return fmt.Sprintf("%+v %v\n%s\n%s", seen, err, back, echoed)
}

// maxGrowthKiB is how much the proxy may buffer for one connection: a few windows, far from a message.
const maxGrowthKiB = 6 << 10

// sizes notes how big a message was on the wire.
type sizes struct{ in, out int }

func (*sizes) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (*sizes) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (*sizes) HandleConn(context.Context, stats.ConnStats)                       {}
func (s *sizes) HandleRPC(_ context.Context, event stats.RPCStats) {
	switch event := event.(type) {
	case *stats.InPayload:
		s.in = event.CompressedLength
	case *stats.OutPayload:
		s.out = event.CompressedLength
	}
}

func compressed(l *look) string {
	noted := &sizes{}
	connection := l.connect(grpc.WithStatsHandler(noted))
	answer := l.answer(withScript(l.ctx, Script{Gzip: true}), connection, unaryMethod, make([]byte, 100_000), grpc.UseCompressor(gzip.Name))
	l.require(noted.in > 0 && noted.in < 5_000 && noted.out < 5_000, "on the wire: %+v", *noted)
	return fmt.Sprintf("%s in=%d", answer, noted.in)
}

func largeMetadata(l *look) string {
	connection, texts := l.connect(), []string{}
	for _, kib := range []int{8, 16, 64} {
		long := strings.Repeat("0123456789abcdef", kib<<6)
		seen, err := l.seenBy(l.ctx, connection, []byte("x"), "long", long)
		arrived := err == nil && slices.Equal(seen.Metadata["long"], []string{long})
		header := l.answer(withScript(l.ctx, Script{Header: [][2]string{{"h", long}}}), connection, unaryMethod, []byte("x"))
		trailer := l.answer(withScript(l.ctx, Script{Trailer: [][2]string{{"t", long}}}), connection, unaryMethod, []byte("x"))
		// An error carries a program's output: the message in the percent form, the detail in base64.
		script := Script{Code: codes.Internal, Message: []byte(strings.Repeat("é", kib<<8)), Details: []byte(long[:kib<<9])}
		failure := l.answer(withScript(l.ctx, script), connection, unaryMethod, []byte("x"))
		for _, text := range []string{header, trailer, failure} {
			texts = append(texts, fmt.Sprintf("%d KiB: %s… %08x", kib, text[:min(len(text), 60)], crc32.ChecksumIEEE([]byte(text))))
		}
		texts = append(texts, fmt.Sprintf("%d KiB request: arrived=%t %v", kib, arrived, status.Code(err)))
	}
	return strings.Join(texts, "\n")
}

func deadlines(l *look) string {
	connection := l.connect()
	without, err := l.seenBy(context.Background(), connection, []byte("x"))
	l.require(err == nil && without.Remaining == 0, "without a deadline the driver sees %v, %v", without.Remaining, err)
	for _, whole := range []time.Duration{500 * time.Millisecond, 10 * time.Second, 2 * time.Minute, 30 * time.Hour} {
		var lost []time.Duration
		for range 101 {
			ctx, cancel := context.WithTimeout(context.Background(), whole)
			seen, err := l.seenBy(ctx, connection, []byte("x"))
			cancel()
			l.require(err == nil && seen.Remaining > 0, "%v: %v, %v", whole, seen.Remaining, err)
			lost = append(lost, whole-seen.Remaining)
		}
		slices.Sort(lost)
		// The wire form may be coarse: eight digits of a unit, so 30 h may be off by a millisecond's rounding.
		median := lost[len(lost)/2]
		l.require(median > -2*time.Second && median < 5*time.Millisecond, "of %v the median call has lost %v before the driver sees it", whole, median)
		if whole < time.Hour {
			l.require(median > -2*time.Millisecond, "of %v the driver sees %v too much", whole, -median)
		}
	}
	return ""
}

func authorities(l *look) string {
	var texts []string
	for _, authority := range []string{"localhost", "%2Ftmp%2Fa%2Fcsi.sock", "/tmp/a/csi.sock", "unix:///tmp/a/csi.sock", "unix:%2Ftmp%2Fcsi.sock", "a.example.com:80"} {
		connection := l.connect(grpc.WithAuthority(authority))
		answer := l.answer(l.ctx, connection, unaryMethod, []byte("x"))
		l.require(strings.HasPrefix(answer, "OK"), "%s: %s", authority, answer)
		if seen := l.authority.Load(); l.through {
			l.require(seen == "localhost", "%s: the driver sees %v", authority, seen)
		}
		texts = append(texts, answer)
	}
	return strings.Join(texts, "\n")
}
